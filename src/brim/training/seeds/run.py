"""`brim train CONFIG --seeds N` from a request to its record: every run in a folder of its own, and a summary.

Runs that can be stacked are trained through the fast path, all others one after the other by the trainer; a note says
which, and why. A finished run is kept: a training that was interrupted continues with those that are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import BrimError, DoesNotFitError, RequestError, plural
from brim.memory.devices import device_uuid
from brim.models.placement import resolve_device
from brim.monitor.live import LiveRun, both
from brim.monitor.loggers.loggers import Loggers, open_loggers
from brim.monitor.sampler import Sampler
from brim.ranks.world import current_world
from brim.records import Plan
from brim.settings.caller import given, named, resume_with
from brim.settings.train_request import TrainCommand, TrainRequest
from brim.storage.files import csv_text, write_atomic, write_json
from brim.storage.run_folder import check_no_other_run
from brim.storage.run_lock import locked_folder
from brim.training.checkpoint import find_checkpoint
from brim.training.fast_path.task import RunsListener
from brim.training.listener import StepRecord, TrainFacts, TrainListener
from brim.training.live_figures import LiveTraining, LoggedTraining
from brim.training.models import input_kind
from brim.training.objective import choose_monitor
from brim.training.run import SEVERAL, TrainResult, run_fingerprint, run_training
from brim.training.run_files import write_record, write_steps
from brim.training.seeds.seed_folder import RunRecord, check_same, loop_record, read_finished, write_stack
from brim.training.seeds.stacked import TrainedStack, train_stacked
from brim.training.seeds.suitability import StackSetup, judge_suitability, refused_by_kind, refused_by_request
from brim.training.seeds.summary import best_rate, mean_epochs, mean_steps, summarise_runs
from brim.training.seeds.variants import Variant, variants_of
from brim.training.setup import TrainingSetup, open_setup

__all__ = ["OneRunListener", "run_seeds", "train_as"]


def train_as(settings: TrainCommand, *, listener: TrainListener | None = None) -> TrainResult:
    """Train, and leave the run's folder behind; with several seeds each has a folder of its own inside it."""
    for note in settings.notes:
        if listener is not None:
            listener.note(note)
    train = run_seeds if settings.request.several else run_training
    return train(settings.request, output=settings.output, listener=listener, log=settings.log)


def run_seeds(
    request: TrainRequest,
    *,
    output: Path | None = None,
    listener: TrainListener | None = None,
    log: Sequence[str] = (),
) -> TrainResult:
    """Train every seed at every learning rate, and leave one folder behind; a run that fails does not stop the rest."""
    if current_world().size > 1:
        raise RequestError(
            f"{named('seeds')}: several seeds are trained in one process; start it without torchrun, or train each "
            "under "
            "torchrun with hp.seed=N"
        )
    watcher = listener or TrainListener()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(locked_folder(output, command="train", note=watcher.note))
        _check_contents(folder, request)
        live = stack.enter_context(LiveRun(folder, "train"))
        loggers = stack.enter_context(open_loggers(log, folder, watcher.note))
        whole = stack.enter_context(loggers.open_run(folder.absolute().name, request.to_json()))
        run = _SeedsRun(request, folder, both(TrainListener, LiveTraining(live), watcher), loggers)
        try:
            result = run.run()
            whole.summary = result.summary
            return result
        except KeyboardInterrupt:
            run.note_interrupted()
            raise


def _check_contents(folder: Path, request: TrainRequest) -> None:
    """Refuse a folder that holds another run, or this one without `resume`, or nothing to resume. Reads no model."""
    check_no_other_run(folder, "train")
    several = (folder / SEVERAL).exists()
    if request.resume and not several:
        raise RequestError(
            f"{named('resume')}: there is no run of several seeds in {folder}; give its folder with -o, or leave "
            f"{named('resume')} out"
        )
    if not request.resume and (several or find_checkpoint(folder) is not None or (folder / "run.json").exists()):
        raise RequestError(
            f"{given('output', folder)}: it holds a run; continue it with {named('resume')}, or choose another folder"
        )


class _SeedsRun:
    """One training of several runs."""

    def __init__(self, request: TrainRequest, folder: Path, listener: TrainListener, loggers: Loggers) -> None:
        self.request = request
        self.folder = folder
        self.listener = listener
        self.loggers = loggers
        self.started_at = datetime.datetime.now(datetime.UTC)
        self.variants = variants_of(request)
        self.records: dict[Variant, RunRecord] = {}
        self.notes: list[str] = []
        self.choice: dict[str, Any] = {"path": "off", "stack": 1, "cuda_graph": False, "reason": "", "trials": []}
        self.machine: dict[str, Any] | None = None
        self.monitor = request.settings.training.monitor
        self.task: str | None = None

    def run(self) -> TrainResult:
        """Open, train what is left, sum up."""
        subject, setup = self._decide()
        if self.request.resume:
            self._take_finished(subject)
        left = [variant for variant in self.variants if variant not in self.records]
        self.listener.runs(total=len(self.variants), done=len(self.records))
        begun = [variant for variant in left if find_checkpoint(self.folder / variant.name) is not None]
        fresh = [variant for variant in left if variant not in begun]
        if isinstance(setup, StackSetup) and len(fresh) == 1 and self.request.fast_path == "auto":
            setup = "there is one run, and the loop keeps a checkpoint of every epoch"
        if isinstance(setup, str):
            self.choice["reason"] = setup
            if fresh and setup != "asked for":
                self._note(f"runs are trained one after the other: {setup}")
            begun, fresh = left, []
        if fresh and isinstance(setup, StackSetup):
            try:
                self._stacked(setup, fresh)
            except DoesNotFitError as error:
                reason = f"the fast path does not fit ({str(error).splitlines()[0]})"
                self.choice |= {"path": "off", "stack": 1, "reason": reason}
                self._note(f"runs are trained one after the other: {reason}")
                begun = [variant for variant in left if variant not in self.records]
        self._one_by_one(begun)
        return self._record()

    def _decide(self) -> tuple[TrainingSetup | None, StackSetup | str]:
        """Whether the fast path may train these runs; the model is opened only where that is not known before."""
        settings = self.variants[0].settings(self.request.settings)
        refused = refused_by_kind(input_kind(settings)) or refused_by_request(self.request)
        if refused is not None:
            return None, refused
        subject = open_setup(settings)
        self.task = subject.objective.task
        validated = subject.data.validation is not None and self.request.validate
        self.monitor = choose_monitor(settings.training.monitor, subject.objective, validated=validated)
        return subject, judge_suitability(subject, self.request, self.variants)

    def _take_finished(self, subject: TrainingSetup | None) -> None:
        for variant in self.variants:
            record = read_finished(self.folder, variant, self.request)
            if record is None:
                continue
            if subject is not None:
                asked = variant.request(self.request)
                own = dataclasses.replace(subject, settings=asked.settings)
                check_same(record, run_fingerprint(own, asked))
            self.records[variant] = record

    def _stacked(self, setup: StackSetup, variants: list[Variant]) -> None:
        self._claim()
        self._announce(setup)
        for note in setup.notes:
            self._note(note)
        self.listener.runs_begin(len(variants))
        setup.subject.model.to("cpu")  # out of the way: every run has weights of its own
        with Sampler(self.folder / "monitor.csv", device_uuid=device_uuid(setup.subject.device)) as sampler:

            def keep(done: TrainedStack) -> None:
                self.choice = done.trained.path_to_json()
                monitor = sampler.summary()
                for record in write_stack(done, setup, self.folder, started_at=self.started_at, monitor=monitor):
                    self._done(record)

            listener = _StackListener(self.listener, self._note)
            train_stacked(setup, variants, listener=listener, keep=keep)
        self.machine = sampler.summary().to_json()

    def _one_by_one(self, variants: list[Variant]) -> None:
        watcher = OneRunListener(self.listener, runs=len(variants), opened=self._claim)
        for place, variant in enumerate(variants):
            folder = self.folder / variant.name
            watcher.begin(place)
            self.listener.run_begins(variant.name)
            resume = find_checkpoint(folder) is not None
            if not resume:  # a shorter run of a stack, or one that failed, has no checkpoint: it begins anew
                for name in ("run.json", "steps.jsonl"):
                    (folder / name).unlink(missing_ok=True)
            asked = variant.request(self.request, resume=resume)
            try:
                result = run_training(asked, output=folder, listener=watcher, notes_resume=False)
            except BrimError as error:
                if error.exit_code != BrimError.exit_code:  # what ends one run so ends them all
                    raise
                self._done(RunRecord(variant=variant, folder=folder, error=str(error)))
                continue
            self.notes += [note for note in result.notes if note not in self.notes]
            self._done(loop_record(self.folder, variant))

    def _claim(self) -> None:
        """From here on the folder is this training's: the request is known to be valid."""
        write_json(self.folder / SEVERAL, {"schema": "brim.runs/1", "runs": [one.name for one in self.variants]})

    def _done(self, record: RunRecord) -> None:
        self.records[record.variant] = record
        self._log(record)
        figures = {name: figure["mean"] for name, figure in record.summary.get("metrics", {}).items()}
        self.listener.run_done(
            {
                "name": record.variant.name, "figures": figures, "error": record.error,
                "best_epoch": record.summary.get("best_epoch"), "epochs": record.summary.get("epochs"),
            }
        )  # fmt: skip

    def _log(self, record: RunRecord) -> None:
        """A run that has ended, with all its steps and epochs."""
        if not self.loggers:
            return
        run = self.loggers.open_run(record.variant.name, record.variant.request(self.request).to_json())
        if record.error is not None:
            run.end({}, state="failed", failure="error", error=record.error)
            return
        LoggedTraining(run).finished(record.steps(), record.rows)
        run.end({"summary": record.summary})

    def note_interrupted(self) -> None:
        """What is kept, and how to resume."""
        done = sum(record.error is None for record in self.records.values())
        if done or (self.folder / SEVERAL).exists():
            self.listener.note(
                f"{done} of {plural(len(self.variants), 'run')} are done and kept, a stack under way begins again: "
                f"continue with {resume_with(self.folder)}"
            )

    def _announce(self, setup: StackSetup) -> None:
        facts = next(iter(setup.tables.values())).facts
        rate, batch = facts["base"] * facts["factor"], setup.effective.batch
        self.listener.opened(setup.subject.facts(epochs=setup.epochs, effective_batch=batch, learning_rate=rate))

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)
            self.listener.note(line)

    def _record(self) -> TrainResult:
        """Sum up and write the files of the training as a whole."""
        records = [self.records[variant] for variant in self.variants]
        done = [record for record in records if record.error is None]
        if not self.choice["reason"]:  # nothing was left to train
            earlier = next((one.summary["fast_path_choice"] for one in done if "fast_path_choice" in one.summary), None)
            self.choice = dict(earlier or {**self.choice, "reason": "as an earlier start had it"})
        rate = best_rate(done, self.monitor)
        best = [record for record in done if record.variant.learning_rate == rate]
        epochs, lines = mean_epochs(best), mean_steps(best)
        summary = summarise_runs(records, monitor=self.monitor, steps=lines, choice=self.choice, machine=self.machine)
        write_atomic(self.folder / "epochs.csv", csv_text(epochs))
        write_steps(self.folder, lines)
        write_atomic(self.folder / "runs.csv", csv_text(summary["runs"]))
        plan = best[0].plan if best else None
        write_record(
            self.folder,
            {**self.request.to_json(), "task": self.task or self._task_of(best)},
            device=resolve_device(self.request.settings.training.device),
            plan=None if plan is None else dict(plan),
            summary={**summary, "notes": self.notes},
            started_at=self.started_at,
        )
        return TrainResult(
            summary=summary,
            folder=self.folder,
            plan=None if plan is None else Plan.from_json(plan),
            epochs=tuple(epochs),
            notes=tuple(self.notes),
            failed=tuple(f"{record.variant.name}: {record.error}" for record in records if record.error is not None),
        )

    def _task_of(self, records: list[RunRecord]) -> str | None:
        """Of runs that the loop opened, from their own record."""
        if not records:
            return None
        document: Mapping[str, Any] = json.loads((records[0].folder / "run.json").read_text(encoding="utf-8"))
        task = document["request"].get("task")
        return None if task is None else str(task)


class _StackListener(RunsListener):
    """Passes on the epochs of a stack; its notes are kept for the record."""

    def __init__(self, listener: TrainListener, note: Callable[[str], None]) -> None:
        self._listener, self._keep_note = listener, note

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        self._listener.stack_epoch(runs=runs, epoch=epoch, epochs=epochs, stopped=stopped)

    def note(self, line: str) -> None:
        self._keep_note(line)


class OneRunListener(TrainListener):
    """Passes on the events of runs that follow each other, so that whoever watches sees one training."""

    def __init__(self, listener: TrainListener, *, runs: int, opened: Callable[[], None]) -> None:
        self._listener = listener
        self._on_opened = opened  # called once, when the first run is known to be a valid request
        self._runs = runs
        self._place = 0
        self._samples = 0  # of one run
        self._opened = self._started = False
        self._notes: set[str] = set()

    def begin(self, place: int) -> None:
        """The run of that place begins."""
        self._place = place

    def opened(self, facts: TrainFacts) -> None:
        """Passed on once: the runs differ in seed and learning rate only."""
        if not self._opened:
            self._opened = True
            self._on_opened()
            self._listener.opened(facts)

    def ready(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Passed on unchanged."""
        self._listener.ready(figures)

    def started(self, total_samples: int, done: int) -> None:
        """One bar for all runs."""
        self._samples = total_samples
        if not self._started:
            self._started = True
            self._listener.started(total_samples * self._runs, done)

    def step(self, record: StepRecord) -> None:
        """The bar counts over all runs."""
        self._listener.step(dataclasses.replace(record, samples=self._place * self._samples + record.samples))

    def validating(self, epoch: int) -> None:
        """Passed on unchanged."""
        self._listener.validating(epoch)

    def note(self, line: str) -> None:
        """Once, though every run has it."""
        if line not in self._notes:
            self._notes.add(line)
            self._listener.note(line)
