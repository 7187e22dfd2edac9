"""What a training publishes while it is under way, from the events that every listener gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from brim.monitor.live import LiveRun
from brim.training.listener import StepRecord, TrainFacts, TrainListener

__all__ = ["LiveTraining"]

STEP_SECONDS = 0.25  # between two updates


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
