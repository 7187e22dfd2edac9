"""What is told of runs that are trained one after the other: one opening, one bar over all of them, a line for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from brim.training.listener import StepRecord, TrainFacts, TrainListener

__all__ = ["OneOfSeveral"]


class OneOfSeveral(TrainListener):
    """Passes on what the loop tells of each run, so that whoever watches sees one training."""

    def __init__(self, listener: TrainListener, *, runs: int, opened: Callable[[], None]) -> None:
        self._listener = listener
        self._told_opened = opened  # called once, when the first run is known to be a right request
        self._runs = runs
        self._place = 0
        self._samples = 0  # of one run
        self._opened = self._started = False
        self._notes: set[str] = set()

    def begin(self, place: int) -> None:
        """The run of that place begins."""
        self._place = place

    def opened(self, facts: TrainFacts) -> None:
        """Said once: the runs differ in seed and learning rate."""
        if not self._opened:
            self._opened = True
            self._told_opened()
            self._listener.opened(facts)

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
        """As it is."""
        self._listener.validating(epoch)

    def note(self, line: str) -> None:
        """Once, though every run has it."""
        if line not in self._notes:
            self._notes.add(line)
            self._listener.note(line)
