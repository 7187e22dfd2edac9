"""What a training run tells whoever watches it."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["StepRecord", "TrainFacts", "TrainListener", "say_nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainFacts:
    """What is about to be trained, on what, and how."""

    model: str
    data: str
    task: str
    parameters: int
    train_samples: int
    validation_samples: int
    device: str
    epochs: int
    steps_per_epoch: int
    effective_batch: int
    learning_rate: float
    ranks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as steps.jsonl keeps it."""

    step: int  # from 1
    epoch: int  # from 0
    samples: int  # seen so far, over all ranks and epochs
    loss: float
    learning_rate: float
    effective_batch: int
    micro_batches: tuple[int, ...]  # of rank 0
    seconds: float
    oom_events: int = 0  # so far
    alloc_retries: int = 0  # of rank 0's allocator, in this step

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return dataclasses.asdict(self)


class TrainListener:
    """Told of the run as it goes; does nothing by itself."""

    def opened(self, facts: TrainFacts) -> None:
        """Model and data are there."""

    def started(self, total_samples: int, done: int) -> None:
        """So many samples will be seen in all, of which so many were seen before a resume."""

    def step(self, record: StepRecord) -> None:
        """A step is done and its loss is known."""

    def validating(self, epoch: int) -> None:
        """An epoch has ended; its validation begins."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch's figures."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""

    def runs(self, *, total: int, done: int) -> None:
        """So many runs (seeds, learning rates) make up the training, of which so many were done before."""

    def run_begins(self, name: str) -> None:
        """A run of several begins by itself."""

    def runs_begin(self, runs: int) -> None:
        """So many runs begin to train through the fast path."""

    def stack_epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """An epoch of so many runs at once has ended."""

    def run_done(self, row: dict[str, Any]) -> None:
        """A run of several is done: its name, its figures, or its error."""


def say_nothing(line: str) -> None:
    """Where nobody listens."""
    del line
