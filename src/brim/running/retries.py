"""Items that ran out of memory alone: set aside, tried again after the others, and once more after a pause.

Another process may have held the memory for a moment, and then one failure says nothing about the item. All items wait
together: one pause, longer the more of them have failed in a row, and short in total, so that a data set of which a
thousand samples truly do not fit is not held up. Runs nothing: the executor does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import sleep

from brim.errors import LostError, RequestError
from brim.memory.failures import Failure, FailureKind, classify

__all__ = ["ATTEMPTS", "Retries", "survivable", "wait"]

ATTEMPTS = 3  # of one item, alone: in its turn, after the others, after a pause
FIRST_PAUSE_SECONDS = 1.0  # doubled with each further failure in a row
LONGEST_PAUSE_SECONDS = 10.0
ALL_PAUSES_SECONDS = 30.0  # of one executor
SLICE_SECONDS = 0.1  # of a pause, between two checks whether the run is to stop


def survivable(error: Exception) -> Failure:
    """The kind of failure that an error is; raises what must not be survived."""
    if isinstance(error, (RequestError, LostError)):
        raise error
    failure = classify(error)
    if failure.kind is FailureKind.FATAL:
        raise LostError(
            f"{failure.reason}; the device cannot be used again by this process. What is finished is kept: start again "
            "with resume"
        ) from error
    return failure


def wait(seconds: float, between: Callable[[], None] = lambda: None) -> None:
    """Let time pass; `between` is called all along and may end it by raising, as Ctrl-C does."""
    left = seconds
    while left > 0:
        between()
        sleep(min(left, SLICE_SECONDS))
        left -= SLICE_SECONDS


class Retries:
    """Which items are set aside, how often each was tried alone, and how long to wait before the last try."""

    def __init__(self) -> None:
        self._aside: dict[int, bool] = {}  # by item: whether other processes may have caused it
        self._attempts: Counter[int] = Counter()
        self._in_a_row = 0  # failures since an item has run
        self._left_seconds = ALL_PAUSES_SECONDS

    def __bool__(self) -> bool:
        return bool(self._aside)

    def __len__(self) -> int:
        return len(self._aside)

    def __contains__(self, item: int) -> bool:
        return item in self._aside

    @property
    def items(self) -> list[int]:
        """What is set aside, in the order in which it first failed."""
        return list(self._aside)

    def attempts(self, item: int) -> int:
        """How often an item has failed alone."""
        return self._attempts[item]

    def failed(self, item: int, failure: Failure, *, by_others: bool) -> bool:
        """An item failed alone, perhaps because of other processes; whether it is set aside, to be tried again."""
        self._attempts[item] += 1
        self._in_a_row += 1
        may_pass = failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.AMBIGUOUS)
        if may_pass and self._attempts[item] < ATTEMPTS:
            self._aside[item] = by_others
            return True
        self._aside.pop(item, None)
        return False

    def ran(self, item: int) -> None:
        """An item has a result."""
        self._aside.pop(item, None)
        self._attempts.pop(item, None)
        self._in_a_row = 0

    def release(self) -> list[int]:
        """Something has changed: the items are no longer aside, and may run like all others."""
        released = self.items
        self._aside.clear()
        return released

    def next_pause(self) -> float:
        """Seconds to wait before the last try; none if no other process can have caused it."""
        if not any(self._aside.values()):
            return 0.0
        doubled = FIRST_PAUSE_SECONDS * 2.0 ** max(min(self._in_a_row, 16) - 1, 0)
        seconds = min(doubled, LONGEST_PAUSE_SECONDS, self._left_seconds)
        self._left_seconds -= seconds
        return seconds
