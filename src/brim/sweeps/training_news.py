"""What an experiment's training run tells the sweep: its rate, its epochs, its notes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from brim.training.listener import StepRecord, TrainFacts, TrainListener

__all__ = ["TrainingNews"]


class TrainingNews(TrainListener):
    """Passes events on as plain values, rates not more often than every `seconds`."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None], *, seconds: float) -> None:
        self._tell = tell
        self._seconds = seconds
        self._told_at: float | None = None
        self._told_samples = 0
        self._total = 0

    def opened(self, facts: TrainFacts) -> None:
        """The effective batch is what a retry must keep."""
        self._tell({"event": "opened", "effective_batch": facts.effective_batch, "device": facts.device})

    def started(self, total_samples: int, done: int) -> None:
        """From here on samples per second are counted."""
        self._total, self._told_samples = total_samples, done
        self._told_at = time.monotonic()

    def step(self, record: StepRecord) -> None:
        """A rate, now and then."""
        now = time.monotonic()
        if self._told_at is None or now - self._told_at < self._seconds:
            return
        rate = (record.samples - self._told_samples) / (now - self._told_at)
        micro = max(record.micro_batches, default=0)
        self._tell(
            {
                "event": "rate",
                "samples": record.samples,
                "total": self._total,
                "samples_per_second": rate,
                "loss": record.loss,
                "micro_batch": micro,
            }
        )
        self._told_at, self._told_samples = now, record.samples

    def epoch(self, row: dict[str, Any]) -> None:
        """The clock goes on after the validation, which is no training."""
        self._tell({"event": "epoch", "row": row})
        self._told_at = time.monotonic()

    def note(self, line: str) -> None:
        """One line."""
        self._tell({"event": "note", "line": line})
