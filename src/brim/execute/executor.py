"""The executor: every item once, whatever happens on the way.

An out-of-memory error splits the batch and goes on from the failed part; an error of one item is found by bisection
and recorded with that item; a fatal error ends the run with what is finished in the journal. No finished batch is
computed again. Knows nothing of models, data or metrics: it runs a function on lists of item numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from brim.config.sizes import format_bytes
from brim.errors import DoesNotFitError, LostError, RequestError
from brim.execute.governor import Governor
from brim.execute.queue import WorkQueue, padded_cost
from brim.memory.failures import Failure, FailureKind, classify
from brim.records import BatchSizes

__all__ = ["Done", "ExecutionFigures", "Executor", "ItemFailure", "PeakMemory"]

FailureReason = Literal["out_of_memory", "size_limit", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemFailure:
    """Why one item has no result."""

    reason: FailureReason
    message: str
    needed_bytes: int | None = None  # at least, for an item that does not fit

    def to_json(self) -> dict[str, Any]:
        """The failure as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """One item, done: its result, or why it has none."""

    item: int
    result: Any
    failure: ItemFailure | None
    batch_size: int


class PeakMemory(Protocol):
    """What the executor needs of a device's memory; `brim.memory.devices.DeviceMemory` has it."""

    def metered(self) -> contextlib.AbstractContextManager[Any]:
        """Measure what runs inside."""

    def release(self, *, thorough: bool = True) -> None:
        """Give back what nothing refers to any more."""


@dataclasses.dataclass(kw_only=True)
class ExecutionFigures:
    """What a run came to, counted as it goes."""

    items: int = 0
    failed: int = 0
    batches: int = 0
    oom_events: int = 0
    seconds: float = 0.0  # inside the function
    cost: int = 0
    padded_cost: int = 0
    batch_counts: list[int] = dataclasses.field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0

    @property
    def padding_fraction(self) -> float:
        """How much of what was computed was padding."""
        return 1 - self.cost / self.padded_cost if self.padded_cost else 0.0

    def batch_sizes(self) -> BatchSizes | None:
        """The sizes of the batches that ran, weighted by their items; None before the first."""
        return BatchSizes.of(self.batch_counts)


class Executor:
    """Runs `function` on batches of item numbers until every item is done.

    `record` is told of every batch as soon as it is done, so that a journal is never behind. With `memory`, a failed
    batch's memory is given back before the next try, and, if `metered`, every batch's peak is taken.
    """

    def __init__(
        self,
        function: Callable[[list[int]], Sequence[Any]],
        costs: Sequence[int],
        *,
        governor: Governor,
        record: Callable[[list[Done]], None],
        memory: PeakMemory | None = None,
        metered: bool = True,
        fail_fast: bool = False,
        fail_on_oom: bool = False,
    ) -> None:
        self.governor = governor
        self.figures = ExecutionFigures()
        self._function = function
        self._costs = costs
        self._record = record
        self._memory = memory
        self._meter_on = memory is not None and metered
        self._fail_fast = fail_fast
        self._fail_on_oom = fail_on_oom

    def run(self, items: Iterable[int]) -> None:
        """Do every item once, dearest first."""
        queue = WorkQueue(self._costs, items)
        while queue:
            batch = queue.take(self.governor.cap)
            failure, error = self._attempt(batch)
            if failure is not None:
                # The except block has ended: nothing pins the failed batch's tensors any more.
                self._release()
                self._after_failure(queue, batch, failure, error)

    def _attempt(self, batch: list[int]) -> tuple[Failure | None, str]:
        """Run one batch and record it; a failure comes back told apart, with the error's own words."""
        cost = padded_cost(self._costs[item] for item in batch)
        try:
            with self._metered() as reading:
                started = time.perf_counter()
                results = self._function(batch)
                seconds = time.perf_counter() - started
        except (RequestError, LostError):
            raise
        except Exception as error:
            failure = classify(error)
            if failure.kind is FailureKind.FATAL:
                raise LostError(
                    f"{failure.reason}; the device cannot be used again by this process. What is finished is kept: "
                    "start again with resume"
                ) from error
            if self._fail_fast and failure.kind in (FailureKind.OTHER, FailureKind.AMBIGUOUS) and len(batch) == 1:
                raise
            return failure, f"{type(error).__name__}: {error}"
        if len(results) != len(batch):
            raise RequestError(
                f"the function returned {len(results)} results for a batch of {len(batch)}; return one for each item"
            )
        self._count(batch, cost, seconds, reading)
        self._record(
            [
                Done(item=item, result=result, failure=None, batch_size=len(batch))
                for item, result in zip(batch, results, strict=True)
            ]
        )
        return None, ""

    def _after_failure(self, queue: WorkQueue, batch: list[int], failure: Failure, error: str) -> None:
        cost = padded_cost(self._costs[item] for item in batch)
        smaller_helps = failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT, FailureKind.AMBIGUOUS)
        if smaller_helps:
            self.figures.oom_events += failure.kind is FailureKind.OUT_OF_MEMORY
            if self._fail_on_oom and failure.kind is not FailureKind.AMBIGUOUS:
                raise DoesNotFitError(f"a batch of {len(batch)} does not fit: {failure.reason} (fail on OOM was asked)")
            self.governor.ran_out(cost)
        if len(batch) == 1:
            self._give_up_on(batch[0], failure, error)
        elif failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT):
            queue.put_back(batch)
        else:
            queue.split(batch)

    def _give_up_on(self, item: int, failure: Failure, error: str) -> None:
        reason: FailureReason = "error"
        message, needed = error, None
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            reason, needed = "out_of_memory", failure.requested_bytes
            more = f"; it asked for {format_bytes(needed)} more" if needed else ""
            message = f"does not fit, even alone: {failure.reason}{more}"
        elif failure.kind is FailureKind.SIZE_LIMIT:
            reason, message = "size_limit", f"a size limit, not memory: {failure.reason}"
        self.figures.failed += 1
        self.figures.items += 1
        self._record([
            Done(item=item, result=None, batch_size=1,
                 failure=ItemFailure(reason=reason, message=message, needed_bytes=needed))
        ])  # fmt: skip

    def _count(self, batch: list[int], cost: int, seconds: float, reading: Any) -> None:
        figures = self.figures
        figures.items += len(batch)
        figures.batches += 1
        figures.seconds += seconds
        figures.cost += sum(self._costs[item] for item in batch)
        figures.padded_cost += cost
        figures.batch_counts.append(len(batch))
        peak = None
        if reading is not None:
            peak = reading.peak_reserved_bytes
            figures.peak_allocated_bytes = max(figures.peak_allocated_bytes, reading.peak_allocated_bytes)
            figures.peak_reserved_bytes = max(figures.peak_reserved_bytes, reading.peak_reserved_bytes)
        self.governor.succeeded(cost, seconds, peak)

    @contextlib.contextmanager
    def _metered(self) -> Iterator[Any]:
        if self._memory is None or not self._meter_on:
            yield None
            return
        with self._memory.metered() as reading:
            yield reading

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()
