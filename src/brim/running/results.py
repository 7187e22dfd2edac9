"""What batches return, one result for each item in the order of the items, and the figures counted over them.

`one_for_each` is the only place that checks the former, for `brim.map`, for functions and tasks that are evaluated, and
for whatever else the executor runs. Knows nothing of what a result is. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from brim.errors import RequestError
from brim.records import BatchSizes

__all__ = ["ExecutionFigures", "ThroughputCurve", "merge_curves", "one_for_each"]

MOST_CURVE_POINTS = 100  # of a throughput curve
MOST_BATCH_TIMES = 100


def one_for_each(results: Any, count: int, *, source: str = "the function") -> list[Any]:
    """The results as a list; anything but `count` of them in an order of their own is a `RequestError`.

    Lists, tuples, arrays and tensors (by their first dimension) have an order. A set has none, a dictionary has that of
    its keys, a text is one answer, and a generator may end anywhere.
    """
    if not _has_order(results):
        raise RequestError(
            f"{source} returned {_described(results)} for a batch of {count}; return a list with one result for each "
            "item, in the order of the items"
        )
    listed = list(results)
    if len(listed) != count:
        raise RequestError(
            f"{source} returned {len(listed)} results for a batch of {count}; return one for each item, in the order "
            "of the items"
        )
    return listed


def _has_order(results: Any) -> bool:
    dimensions = getattr(results, "ndim", None)  # of an array or a tensor; without any it is a single number
    if isinstance(results, (Mapping, Set, str, bytes, bytearray, memoryview)) or dimensions == 0:
        return False
    if hasattr(results, "keys") and dimensions != 1:  # a table: iterating over it gives the names of its columns
        return False
    return all(hasattr(results, name) for name in ("__len__", "__getitem__", "__iter__"))


def _described(results: Any) -> str:
    if results is None:
        return "nothing (None)"
    kind = type(results).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


@dataclasses.dataclass(kw_only=True)
class ExecutionFigures:
    """The totals of a run, counted batch by batch."""

    items: int = 0
    failed: int = 0
    batches: int = 0
    oom_events: int = 0
    seconds: float = 0.0  # inside the function, one batch after the other
    busy_seconds: float = 0.0  # of these, the device's own where they are known: without waiting for items
    cost: int = 0
    padded_cost: int = 0
    largest_padded_cost: int = 0  # of one batch, in the unit of the cap
    warm_up_seconds: float = 0.0  # of `busy_seconds`: the first batch, which loads kernels whatever its size
    warm_up_padded_cost: int = 0
    search_seconds: float = 0.0  # of `busy_seconds`: between the first batch and the size's settling
    search_padded_cost: int = 0
    best_search_rate: float = 0.0  # padded cost a second
    lost_seconds: float = 0.0  # in batches that failed, and in cleaning up after them
    batch_counts: list[int] = dataclasses.field(default_factory=list)
    batch_times: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)  # samples, padded cost, seconds
    batch_times_every: int = 1  # of the batches, how many each of these stands for
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    alloc_retries: int | None = None  # in batches that ran; None: the device does not count them

    def add_peak(self, reading: Any) -> None:
        """The memory that a batch was seen to take."""
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, reading.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reading.peak_reserved_bytes)
        if self.alloc_retries is not None:
            self.alloc_retries += reading.alloc_retries

    def add_batch_time(self, samples: int, padded: int, seconds: float) -> None:
        """Keep the time of a batch, of at most 100: when full, every second one is dropped. Not of the first batch."""
        if self.batches < 2 or (self.batches - 1) % self.batch_times_every:
            return
        self.batch_times.append((samples, padded, seconds))
        if len(self.batch_times) == MOST_BATCH_TIMES:
            self.batch_times = self.batch_times[1::2]
            self.batch_times_every *= 2

    @property
    def padding_fraction(self) -> float:
        """How much of what was computed was padding."""
        return 1 - self.cost / self.padded_cost if self.padded_cost else 0.0

    @property
    def planning_seconds(self) -> float:
        """What finding the size has cost: failed batches, and what those before it settled took more than later ones.

        Nothing else is lost, since every batch's results are kept. The first batch is not counted: it takes long at a
        size that was given as well.
        """
        settled_cost = self.padded_cost - self.search_padded_cost - self.warm_up_padded_cost
        settled = self.busy_seconds - self.search_seconds - self.warm_up_seconds
        rate = settled_cost / settled if settled_cost > 0 and settled > 0 else self.best_search_rate
        at_that_rate = self.search_padded_cost / rate if rate else self.search_seconds
        return self.lost_seconds + max(self.search_seconds - at_that_rate, 0.0)

    def batch_sizes(self) -> BatchSizes | None:
        """The sizes of the batches that ran, weighted by their items; None before the first."""
        return BatchSizes.of(self.batch_counts)


class ThroughputCurve:
    """Samples done over time, in at most 100 points however long the run: when full, every second one is dropped."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._last: tuple[float, int] | None = None
        self._every, self._seen = 1, 0

    def add(self, seconds: float, done: int) -> None:
        """So many samples are done after so many seconds; both count from the beginning."""
        self._last = (seconds, done)
        self._seen += 1
        if self._seen % self._every:
            return
        self._points.append(self._last)
        if len(self._points) == MOST_CURVE_POINTS:
            self._points = self._points[1::2]  # the later of each pair, so that the points stay equally far apart
            self._every *= 2

    def points(self) -> tuple[tuple[float, int], ...]:
        """The points so far; the last one is the last that was added."""
        if self._last is None or (self._points and self._points[-1] == self._last):
            return tuple(self._points)
        return (*self._points, self._last)


def merge_curves(curves: Iterable[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The curves of processes that worked side by side as one: what all had done at each moment."""
    known = [curve for curve in curves if curve]
    moments = sorted((seconds, place, done) for place, curve in enumerate(known) for seconds, done in curve)
    done_by = [0.0] * len(known)
    merged = ThroughputCurve()
    for seconds, place, done in moments:
        done_by[place] = done
        merged.add(seconds, int(sum(done_by)))
    return [[seconds, done] for seconds, done in merged.points()]
