"""One size against a larger one, by the rates of batches: is the larger one worth its memory?

It is given every rate, and answers what to run next. There are two ways, because rates mislead in two ways. Where
costliest items come first the rate drifts by itself, so twice the size is tried between two batches of this one. Where
items are all alike there is no drift, but noise only ever makes a batch longer: one good trial of the larger size is
enough to keep it, and refusing it takes more. A size kept wrongly costs memory, one refused wrongly the whole run.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from brim.sizing.constants import (
    COMPARED_BATCHES,
    EARLY_COMPARED_BATCHES,
    EARLY_SECONDS,
    FASTER_NOW,
    MIN_SPEEDUP_TO_GROW,
    MOST_DOUBTS,
)

__all__ = ["Drifting", "Next", "RateComparison", "Steady"]

Next = Literal["this", "larger", "keep", "refuse"]  # which size to run next, or which one it is to be


class RateComparison(abc.ABC):
    """Rates of this size and of a larger one."""

    steady: ClassVar[bool] = False  # whether a rate is the size's own, whenever it was seen

    def __init__(self) -> None:
        self.before: float | None = None  # the rate of this size
        self.usual = 0.0  # the rate of this size, when the larger one is refused
        self._trials: list[float] = []  # rates of the larger size
        self._again = False  # whether this size is timed again, the trials being over

    def begin(self, before: float | None = None) -> None:
        """A new comparison, with the rate of this size where it is known."""
        self.before, self._trials, self._again = before, [], False

    def timed(self, seconds: float) -> None:  # noqa: B027  # not all keep time
        """A batch took so long, while comparing or before."""

    def compare(self, rate: float) -> Next:
        """The rate of a batch at the size that was asked for."""
        if self.before is None:
            self.before = rate
            return "larger"
        if self._again:
            return self._judge(self.before, rate, max(self._trials))
        self._trials.append(rate)
        if self._convinced(self.before, rate):
            self.begin(rate)
            return "keep"
        self._again = len(self._trials) >= self._enough()
        return "this" if self._again else "larger"

    def to_json(self) -> dict[str, Any]:
        """The rates so far, as a checkpoint keeps them."""
        return {"before": self.before, "usual": self.usual, "trials": list(self._trials), "again": self._again}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue where `to_json` was called."""
        self.before, self.usual = data["before"], data["usual"]
        self._trials, self._again = list(data["trials"]), data["again"]

    def _convinced(self, before: float, rate: float) -> bool:
        """Whether one trial is enough to keep the larger size."""
        del before, rate
        return False

    def _enough(self) -> int:
        """Trials until this size is timed again."""
        return COMPARED_BATCHES

    @abc.abstractmethod
    def _judge(self, before: float, again: float, larger: float) -> Next:
        """With this size seen before and after the trials."""


class Drifting(RateComparison):
    """The larger size must beat the mean of this one before and after it."""

    def _judge(self, before: float, again: float, larger: float) -> Next:
        self.usual = (before + again) / 2
        if larger < MIN_SPEEDUP_TO_GROW * self.usual:
            return "refuse"
        self.begin()
        return "keep"


class Steady(RateComparison):
    """The larger size is kept at once if it beats this one, and refused with care.

    In a run's first seconds the host prepares items and loads kernels, all sizes seem slow, and twice the size no
    faster. So it is tried more often then; and where this size, timed again, is faster than it was, neither rate
    was the size's own: once more.
    """

    steady = True

    def __init__(self) -> None:
        super().__init__()
        self._doubts = MOST_DOUBTS
        self._seconds = 0.0  # of all batches timed

    def to_json(self) -> dict[str, Any]:
        """With the time and the doubts that are left."""
        return {**super().to_json(), "doubts": self._doubts, "seconds": self._seconds}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue where `to_json` was called."""
        super().restore(data)
        self._doubts, self._seconds = data.get("doubts", MOST_DOUBTS), data.get("seconds", 0.0)

    def timed(self, seconds: float) -> None:
        """Count the seconds: larger sizes are tried more often in a run's first ones."""
        self._seconds += seconds

    def _convinced(self, before: float, rate: float) -> bool:
        return rate >= MIN_SPEEDUP_TO_GROW * before

    def _enough(self) -> int:
        return EARLY_COMPARED_BATCHES if self._seconds < EARLY_SECONDS else COMPARED_BATCHES

    def _judge(self, before: float, again: float, larger: float) -> Next:
        del larger  # no trial was good enough
        if self._doubts > 0 and again >= FASTER_NOW * before:
            self._doubts -= 1
            self.begin(again)
            return "larger"
        self.usual = max(before, again)
        return "refuse"
