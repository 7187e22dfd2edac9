"""A sweep from its plan to its results: jobs are made, given to a launcher, recorded, retried and summarised.

A retry trains on the same samples in smaller micro-batches, and so does the first attempt where the forecast says that
the batch size does not fit.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from brim.errors import plural
from brim.monitor.loggers.loggers import Loggers, open_loggers
from brim.settings.grid import Expansion
from brim.settings.sweep_request import SweepRequest
from brim.storage.files import csv_text, read_json, write_atomic, write_json
from brim.storage.run_folder import write_run
from brim.storage.run_lock import locked_folder
from brim.sweeps.forecasts import SizeForecast, bytes_needed
from brim.sweeps.job import AttemptOutcome, Job, Recorder, SweepListener
from brim.sweeps.results import Result, choose_goal, detail_rows, result_row, sorted_results, sweep_document
from brim.sweeps.state import SweepState

__all__ = [
    "MOST_RETRIES", "Launcher", "SweepPlan", "SweepResult", "first_attempt", "log_experiment", "next_attempt",
    "run_sweep",
]  # fmt: skip

MOST_RETRIES = 2
MARGINS = (0.25, 0.5)  # of the device's memory that a planned size leaves free at each retry


def first_attempt(job: Job, forecast: SizeForecast | None) -> Job:
    """The job as it starts: a batch size that is forecast not to fit becomes the micro-batches that do.

    With `fail_on_oom` the size is exactly the one asked for.
    """
    asked, hyper = job.batch_size, job.settings.get("hp") or {}
    if not isinstance(asked, int):
        return job
    # A batch size that is given is the effective batch as well: named, it stays when micro-batches are made smaller.
    changes = {"hp.effective_batch": asked} if hyper.get("effective_batch") is None else {}
    fitting = 0 if forecast is None or forecast.fits is not False else forecast.batch_size_max or 0
    if job.fail_on_oom or not 0 < fitting < asked:
        return dataclasses.replace(job, changes=changes)
    because = f"{asked} is forecast not to fit: in micro-batches of at most {fitting}"
    changes = {**changes, **_smaller(hyper, size=fitting, asked=asked, effective_batch=asked)}
    return dataclasses.replace(job, changes=changes, changed_because=because)


def next_attempt(
    job: Job, outcome: AttemptOutcome, *, planned: int | None, effective_batch: int | None, retry: bool = True
) -> Job | None:
    """The next attempt after a failure, or None: it stays failed.

    Out of memory: alone on its device, at `planned` samples (the largest size forecast to fit) where that is less than
    what was tried, else at half. The effective batch and the batch that the learning rate was chosen for stay, so that
    what is learnt stays. A process whose device or machine was lost is started again as it was.
    """
    if not retry or outcome.state != "failed" or job.retries >= MOST_RETRIES:
        return None
    again = dataclasses.replace(job, attempt=job.attempt + 1, retries=job.retries + 1)
    if outcome.failure == "lost":
        return again
    if outcome.failure != "out_of_memory":
        return None
    tried = job.changes.get("hp.batch_size", job.batch_size)
    if not isinstance(tried, int):
        margin = MARGINS[job.retries]
        because = f"ran out of memory; planned again with {margin:.0%} of the memory kept free"
        return _changed(again, {"training.margin": margin}, because)
    if tried <= 1:
        return None
    size = planned if planned is not None and 0 < planned < tried else tried // 2
    because = f"{tried} ran out of memory: retried at {size}" + (" (forecast to fit)" if size == planned else "")
    hyper = job.run_settings.get("hp") or {}
    changes = _smaller(hyper, size=size, asked=tried, effective_batch=effective_batch or tried)
    return _changed(again, changes, because)


def _smaller(hyper: Mapping[str, Any], *, size: int, asked: int, effective_batch: int) -> dict[str, Any]:
    """Settings for micro-batches of at most `size`: an optimizer step and its learning rate stay as they are."""
    kept = {"hp.effective_batch": effective_batch, "hp.base_batch": asked}
    return {
        "hp.batch_size": size,
        **{key: value for key, value in kept.items() if hyper.get(key.removeprefix("hp.")) is None},
    }


def _changed(job: Job, changes: dict[str, Any], because: str) -> Job:
    reasons = f"{job.changed_because}; {because}" if job.changed_because else because
    return dataclasses.replace(job, changes={**job.changes, **changes}, changed_because=reasons, alone=True)


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
    """The result of a sweep."""

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
        open_loggers(request.loggers, folder, watcher.note) as loggers,
    ):
        recording = _Recording(plan, request, state, watcher, loggers)
        interrupted = True
        try:
            recording.begin()
            launcher.run(recording.jobs(), recording)
            interrupted = False
        finally:
            document = recording.write(interrupted=interrupted)
            _write_record(folder, request, document, started_at)
    return SweepResult(folder=folder, document=document, results=tuple(recording.results()))


def log_experiment(loggers: Loggers, job: Job, outcome: AttemptOutcome) -> None:
    """Once, when it has ended, with all its epochs: a retry or a resumed sweep leaves no half curves."""
    run = loggers.open_run(job.id, job.run_settings)
    for row in outcome.epochs:
        run.log({name: value for name, value in row.items() if name != "epoch"}, step=int(row.get("epoch", 0)))
    best = {f"best_{name}": value for name, value in (outcome.figures.get("best") or {}).items()}
    totals = {name: value for name, value in outcome.figures.items() if not isinstance(value, Mapping)}
    run.end(
        {**best, **totals, "seconds": outcome.seconds}, state=outcome.state, failure=outcome.failure,
        error=outcome.error,
    )  # fmt: skip


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
        self._outcomes: dict[str, AttemptOutcome] = {}
        self._devices: dict[str, str] = {}
        self._effective: dict[str, int] = {}  # the effective batch that an experiment has reported
        self._write_at = 0.0  # not before

    def begin(self) -> None:
        """Take over what is done already."""
        ids = [experiment.id for experiment in self._plan.expansion]
        self._outcomes |= self._state.completed(ids)
        self._listener.planned(len(ids), len(self._outcomes))
        others = self._state.unknown_experiments(ids)
        if others:
            self.note(f"{plural(len(others), 'experiment')} of this folder no longer in the file: left as before")

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

    def ended(self, job: Job, outcome: AttemptOutcome) -> Job | None:
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
            log_experiment(self._loggers, job, outcome)
        self._listener.ended(job, outcome, again)
        if time.monotonic() >= self._write_at:
            self._write_tables()
        return again

    def note(self, line: str) -> None:
        self._listener.note(line)

    def results(self) -> list[Result]:
        """Every experiment and its result, in the file's order."""
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
