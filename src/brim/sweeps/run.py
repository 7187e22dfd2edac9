"""A sweep from its plan to its results: jobs are made, handed to a launcher, recorded, tried again, summed up."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from brim.settings.grid import Expansion
from brim.settings.sweep_request import SweepRequest
from brim.storage.files import read_json, write_atomic, write_json
from brim.storage.run_folder import write_run
from brim.storage.run_lock import locked_folder
from brim.storage.tables import csv_text
from brim.sweeps.forecasts import SizeForecast, bytes_needed
from brim.sweeps.job import Job, Outcome
from brim.sweeps.listener import Recorder, SweepListener
from brim.sweeps.loggers import Loggers, open_loggers
from brim.sweeps.results import Result, choose_goal, detail_rows, result_row, sorted_results
from brim.sweeps.retry import first_attempt, next_attempt
from brim.sweeps.state import SweepState
from brim.sweeps.summary import sweep_document

__all__ = ["Launcher", "SweepPlan", "SweepResult", "run_sweep"]

WRITE_SECONDS = 2.0  # between two writings of the tables while experiments end


class Launcher(Protocol):
    """Runs jobs somewhere, each to its end, and what the recorder wants tried again as well."""

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        """Returns when nothing is left to do; Ctrl-C stops what runs, reports it, and is raised on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The experiments of a file and the memory each is forecast to take, by id."""

    expansion: Expansion
    forecasts: Mapping[str, SizeForecast] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep came to."""

    folder: Path
    document: Mapping[str, Any]  # sweep.json
    results: tuple[Result, ...]  # in the file's order

    @property
    def failed(self) -> tuple[Result, ...]:
        """The experiments that failed."""
        return tuple(result for result in self.results if result.state == "failed")

    @property
    def best(self) -> tuple[Result, ...]:
        """Those with a figure, the best first."""
        goal = choose_goal(self.results)
        return tuple(one for one in sorted_results(self.results, goal) if goal and one.metric(goal.metric) is not None)


def run_sweep(
    plan: SweepPlan,
    request: SweepRequest,
    launcher: Launcher,
    *,
    output: Path | None = None,
    listener: SweepListener | None = None,
) -> SweepResult:
    """Run every experiment that is not done yet, and leave the sweep's folder behind."""
    watcher = listener or SweepListener()
    started_at = datetime.datetime.now(datetime.UTC)
    with (
        locked_folder(output, command="sweep", note=watcher.note) as folder,
        SweepState(folder, resume=request.resume, note=watcher.note) as state,
    ):
        loggers = open_loggers(request.loggers, folder, watcher.note)
        recording = _Recording(plan, request, state, watcher, loggers)
        interrupted = True
        try:
            recording.begin()
            launcher.run(recording.jobs(), recording)
            interrupted = False
        finally:
            loggers.close()
            document = recording.write(interrupted=interrupted)
            _write_record(folder, request, document, started_at)
    return SweepResult(folder=folder, document=document, results=tuple(recording.results()))


class _Recording:
    """What launchers report to: the journal, the tables, and what is tried again."""

    def __init__(
        self, plan: SweepPlan, request: SweepRequest, state: SweepState, listener: SweepListener, loggers: Loggers
    ) -> None:
        self._plan = plan
        self._request = request
        self._state = state
        self._listener = listener
        self._loggers = loggers
        self._outcomes: dict[str, Outcome] = {}
        self._devices: dict[str, str] = {}
        self._effective: dict[str, int] = {}  # the effective batch that an experiment has said it has
        self._write_at = 0.0  # not before

    def begin(self) -> None:
        """Take over what is done already."""
        ids = [experiment.id for experiment in self._plan.expansion]
        self._outcomes |= self._state.completed(ids)
        self._listener.planned(len(ids), len(self._outcomes))
        others = self._state.strangers(ids)
        if others:
            self.note(f"{len(others)} experiments of this folder are no more in the file; they are left as they are")

    def jobs(self) -> list[Job]:
        """The first attempt of every experiment that is not completed."""
        request = self._request
        return [
            first_attempt(
                Job(
                    id=experiment.id,
                    settings=experiment.settings,
                    folder=str(self._state.experiment_folder(experiment.id).absolute()),
                    attempt=self._state.attempts(experiment.id) + 1,
                    fail_on_oom=not request.retry,
                    use_cache=request.use_cache,
                    bytes_needed=bytes_needed(self._plan.forecasts.get(experiment.id)),
                    device=_device_asked(experiment.settings),
                ),
                self._plan.forecasts.get(experiment.id),
            )
            for experiment in self._plan.expansion
            if experiment.id not in self._outcomes
        ]

    def started(self, job: Job, device: str) -> None:
        self._state.started(job, device)
        self._devices[job.id] = device
        self._listener.started(job, device)

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        if event["event"] == "opened" and isinstance(event.get("effective_batch"), int):
            self._effective[job.id] = event["effective_batch"]
        self._listener.event(job, event)

    def ended(self, job: Job, outcome: Outcome) -> Job | None:
        self._state.ended(outcome)
        self._outcomes[job.id] = outcome
        forecast = self._plan.forecasts.get(job.id)
        again = next_attempt(
            job,
            outcome,
            planned=None if forecast is None else forecast.batch_size_max,
            effective_batch=self._effective.get(job.id),
            retry=self._request.retry,
        )
        if again is None and outcome.state != "interrupted":
            self._loggers.log(job, outcome)
        self._listener.ended(job, outcome, again)
        if time.monotonic() >= self._write_at:
            self._write_tables()
        return again

    def note(self, line: str) -> None:
        self._listener.note(line)

    def results(self) -> list[Result]:
        """Every experiment and what became of it, in the file's order."""
        return [
            Result(
                experiment=experiment,
                outcome=self._outcomes.get(experiment.id),
                forecast=self._plan.forecasts.get(experiment.id),
                attempts=self._state.attempts(experiment.id),
                device=self._devices.get(experiment.id, ""),
                folder=f"experiments/{experiment.id}",
            )
            for experiment in self._plan.expansion
        ]

    def write(self, *, interrupted: bool) -> dict[str, Any]:
        """Leave sweep.json and the tables."""
        self._write_tables()
        document = sweep_document(
            self._plan.expansion, self.results(), file=self._request.file, interrupted=interrupted
        )
        write_json(self._state.folder / "sweep.json", document)
        return document

    def _write_tables(self) -> None:
        began = time.monotonic()
        results = self.results()
        table = csv_text([result_row(result) for result in results], first=("id",))
        write_atomic(self._state.folder / "results.csv", table)
        write_atomic(self._state.folder / "details.csv", csv_text(detail_rows(results), first=("id", "epoch")))
        if self._request.results_file is not None:
            write_atomic(Path(self._request.results_file), table)
        now = time.monotonic()
        self._write_at = now + max(WRITE_SECONDS, 20 * (now - began))  # thousands of rows take a while


def _device_asked(settings: Mapping[str, Any]) -> str | None:
    """The device that an experiment names itself; None: any."""
    asked = str((settings.get("training") or {}).get("device") or "auto")
    return None if asked == "auto" else asked


def _write_record(
    folder: Path, request: SweepRequest, document: Mapping[str, Any], started_at: datetime.datetime
) -> None:
    """run.json: the environment is that of the first experiment that has one."""
    environment: dict[str, Any] = {}
    for entry in document["experiments"]:
        record: Any = read_json(folder / entry["result"]["folder"] / "run.json")
        if isinstance(record, dict) and isinstance(record.get("environment"), dict):
            environment = record["environment"]
            break
    summary = {
        name: document[name] for name in ("state", "counts", "metric", "ranking", "time_saved", "failures", "pairing")
    }
    write_run(
        folder,
        kind="sweep",
        request={**request.to_json(), "command": "sweep"},
        environment=environment,
        plan=None,
        summary=summary,
        started_at=started_at,
    )
