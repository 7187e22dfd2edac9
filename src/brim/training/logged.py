"""What a training sends to loggers, from the events that every listener gets: about a thousand steps, every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from brim.monitor.loggers.loggers import LoggedRun
from brim.training.listener import StepRecord, TrainListener

__all__ = ["LoggedTraining"]

MOST_POINTS = 1000  # of a run's steps
_PLACE = ("epoch", "step", "samples")  # of an epoch's row: where it is, not what it measured


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
