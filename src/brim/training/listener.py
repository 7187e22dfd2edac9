"""Who watches a training run, and how it is asked to stop.

Ctrl-C ends the run after the step under way, with a checkpoint; a second one at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Interrupt", "StepRecord", "TrainFacts", "TrainListener", "ignore_note", "interrupt_as_request"]


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
    device_uuid: str | None = None


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
    """Called as the run proceeds; every method does nothing unless overridden."""

    def opened(self, facts: TrainFacts) -> None:
        """Model and data are there."""

    def ready(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """The trainer is there; `figures` gives, at any time, how the size was found, seconds waited and peak bytes."""

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


def ignore_note(line: str) -> None:
    """For callers that show no notes."""
    del line


class Interrupt:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Where there is nothing to finish: stop here if asked."""
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_as_request(note: Callable[[str], None]) -> Iterator[Interrupt]:
    """While inside, the first Ctrl-C only asks; the second one stops at once.

    Outside the main thread, or where somebody else handles the signal, nothing is changed.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupt
        return

    def handle(number: int, frame: object) -> None:
        del number, frame
        interrupt.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
