"""What a training publishes and sends to loggers while it is under way, from the events that listeners get."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from brim.monitor.live import LiveRun
from brim.monitor.loggers.loggers import LoggedRun
from brim.training.listener import StepRecord, TrainFacts, TrainListener

__all__ = ["LiveTraining", "LoggedTraining"]

STEP_SECONDS = 0.25  # between two updates
MOST_POINTS = 1000  # of a run's steps, in a logger
_PLACE = ("epoch", "step", "samples")  # of an epoch's row: where it is, not what it measured


class LiveTraining(TrainListener):
    """Keeps a `LiveRun` up to date; of several seeds, `label` says which is under way."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._figures: Callable[[], Mapping[str, Any]] = dict
        self._started = time.monotonic()
        self._record: StepRecord | None = None  # the last one
        self._publish_at = 0.0  # not before
        self._runs_done, self._runs = 0, 0

    def opened(self, facts: TrainFacts) -> None:
        """What is trained, and where."""
        self._live.update(state="running", device=facts.device, device_uuid=facts.device_uuid, ranks=facts.ranks)

    def ready(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Where the sizes come from."""
        self._figures = figures

    def started(self, total_samples: int, done: int) -> None:
        """How much there is to do."""
        self._started = time.monotonic()
        self._live.update(done=done, total=total_samples, unit="samples")

    def step(self, record: StepRecord) -> None:
        """How far it is; not more often than it is worth, since a step may take less than a millisecond."""
        self._record = record
        now = time.monotonic()
        if now >= self._publish_at:
            self._publish_at = now + STEP_SECONDS
            self._publish(record)

    def _publish(self, record: StepRecord | None) -> None:
        if record is None:
            return
        figures = dict(self._figures())
        waited = figures.pop("wait_seconds", None)
        seconds = time.monotonic() - self._started
        self._live.update(
            state="running",
            done=record.samples,
            loss=record.loss,
            batch_size=max(record.micro_batches, default=None),
            samples_per_second=record.effective_batch / max(record.seconds, 1e-9),
            oom_events=record.oom_events,
            waiting_fraction=None if waited is None or not seconds else min(waited / seconds, 1.0),
            **figures,
        )

    def validating(self, epoch: int) -> None:
        """Say so."""
        del epoch
        self._publish(self._record)
        self._live.update(state="validating")

    def epoch(self, row: dict[str, Any]) -> None:
        """The first figure of the validation."""
        self._publish(self._record)
        name = next((name for name in row if name.startswith("val_") and row[name] is not None), None)
        metric = None if name is None else {"name": name, "value": row[name]}
        self._live.update(state="running", **({} if metric is None else {"metric": metric}))

    def note(self, line: str) -> None:
        """The last one is shown."""
        self._live.update(note=line)

    def runs(self, *, total: int, done: int) -> None:
        """How many runs there are."""
        self._runs, self._runs_done = total, done
        self._label()

    def run_done(self, row: dict[str, Any]) -> None:
        """One more."""
        del row
        self._publish(self._record)
        self._runs_done += 1
        self._label()

    def runs_begin(self, runs: int) -> None:
        """They train together: epochs are counted."""
        del runs
        self._live.update(state="running", unit="epochs", done=0)

    def stack_epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """How far they are."""
        del runs, stopped
        self._live.update(done=epoch, total=epochs, unit="epochs")

    def _label(self) -> None:
        self._live.update(label=f"{self._runs_done}/{self._runs} runs done")


class LoggedTraining(TrainListener):
    """Steps and epochs of one run, over the count of optimizer steps."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._figures: Callable[[], Mapping[str, Any]] = dict
        self._samples_between = self._next_samples = 0.0

    def ready(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Where the peak bytes come from."""
        self._figures = figures

    def started(self, total_samples: int, done: int) -> None:
        """How far apart the points are."""
        del done
        self._samples_between = total_samples / MOST_POINTS

    def step(self, record: StepRecord) -> None:
        """Most steps of a long run are passed over."""
        if record.samples < self._next_samples:
            return
        self._next_samples = record.samples + self._samples_between
        self._run.log(
            {
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "samples_per_second": record.effective_batch / max(record.seconds, 1e-9),
                "micro_batch": max(record.micro_batches, default=0),
                "peak_reserved_bytes": self._figures().get("peak_reserved_bytes"),
                "oom_events": record.oom_events,
            },
            step=record.step,
        )

    def epoch(self, row: dict[str, Any]) -> None:
        """A row of epochs.csv."""
        self._run.log({f"epoch/{name}": row[name] for name in row if name not in _PLACE}, step=row["step"])

    def finished(self, steps: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> None:
        """The events of a whole run that was not logged while it trained, from its files."""
        records = [StepRecord(**line) for line in steps]
        self.started(records[-1].samples if records else 0, 0)
        ends = {row["step"]: dict(row) for row in rows}
        for record in records:
            self.step(record)
            if record.step in ends:
                self.epoch(ends[record.step])
