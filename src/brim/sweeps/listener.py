"""What a sweep tells whoever watches it, and what a launcher tells the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from brim.sweeps.job import Job, Outcome

__all__ = ["Recorder", "SweepListener"]


class SweepListener:
    """Told of the sweep as it goes; does nothing by itself."""

    def forecasting(self, what: str) -> None:
        """The memory of an experiment is being forecast."""

    def planned(self, experiments: int, done: int) -> None:
        """So many experiments, of which so many were done before."""

    def started(self, job: Job, device: str) -> None:
        """An attempt begins."""

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        """An experiment reports something: opened, rate, epoch, note."""

    def ended(self, job: Job, outcome: Outcome, retried: Job | None) -> None:
        """An attempt is over; `retried` is the one that follows it."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""


class Recorder(Protocol):
    """What launchers report to; it writes the journal and decides what is tried again."""

    def started(self, job: Job, device: str) -> None:
        """An attempt begins."""

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        """An experiment reports something."""

    def ended(self, job: Job, outcome: Outcome) -> Job | None:
        """An attempt is over; gives the attempt to make next, if there is one."""

    def note(self, line: str) -> None:
        """Something that the user should know."""
