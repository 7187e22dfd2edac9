"""Work in a pool: items come and go one by one, and each is given out when it ends.

The executor's other half, for work whose items end at different times. Costliest first, as there. A pool that runs out
of memory is made again, smaller, and what was in it starts anew; an error that is not memory's ends the pool, and what
is left goes to the executor, which finds the item that causes it. Knows nothing of models, data or metrics.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from brim.errors import DoesNotFitError, first_line
from brim.memory.failures import Failure, FailureKind
from brim.records import Probe
from brim.running.executor import ExecutionPolicy, Finished, ItemFailure, finished_item
from brim.running.interrupts import InterruptWatch
from brim.running.loader import NotPrepared
from brim.running.results import ExecutionFigures
from brim.running.retries import survivable
from brim.sizing.pool import PoolNeeds, PoolSize, PoolSizer

__all__ = ["ItemPool", "PoolMemory", "PoolSource", "PoolWork", "PooledExecutor", "PooledResult"]

NOT_READY_SECONDS = 0.05  # items that had to be waited for this long are not being prepared fast enough
REFILL_SECONDS = 2.0  # of admitting without a step: answers wait, and so does an interrupt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledResult:
    """An item's result, and how many items were in the pool when it was admitted."""

    item: int
    result: Any
    shared_with: int


class ItemPool(Protocol):
    """What a task gives: a place for items until each has its result."""

    @property
    def computed(self) -> int:
        """What was computed so far, in the task's unit."""

    @property
    def useful(self) -> int:
        """Of that, what was not padding."""

    @property
    def active(self) -> int:
        """Items in it."""

    @property
    def slots(self) -> int:
        """Its size."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""

    def admit(self, items: Sequence[int], prepared: Sequence[Any]) -> int:
        """Take items, from the first, as far as there is room; how many."""

    def advance(self) -> list[PooledResult]:
        """Work for a while; what has ended."""

    def grow(self, slots: int) -> None:
        """More room."""

    def tensors(self) -> Sequence[Any]:
        """What it holds."""

    def release(self) -> None:
        """Free it."""


class PoolSource(Protocol):
    """Pools for the items of a run."""

    first_slots: int  # for the items by which the size is found
    portion: int  # cost of the items that are prepared and admitted together, at most, unless it is one
    notes: list[str]

    def needs(self, items: Sequence[int]) -> PoolNeeds:
        """What these items need."""

    def open(self, size: PoolSize) -> ItemPool:
        """An empty pool."""


class PoolMemory(Protocol):
    """What is needed of a device's memory; `brim.memory.devices.ModelMemory` has it."""

    def metered(self, held: Iterable[Any] = ()) -> Any:
        """Measure what runs inside; `held` is there already."""

    def release(self, *, thorough: bool = True) -> None:
        """Give back what nothing refers to any more."""

    def left_by_others_bytes(self) -> int | None:
        """What other processes leave of the device now; None: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolWork:
    """What runs in the pool, and how items are prepared for it."""

    source: PoolSource
    take: Callable[[list[int]], list[Any]]  # prepared items, or a `NotPrepared` each
    costs: Sequence[int]
    note: Callable[[str], None]
    set_aside: Callable[[list[int]], None] = lambda _: None  # what was prepared of these may be forgotten
    ahead: Callable[[], bool] = lambda: False  # whether items are prepared while the device works
    begin: Callable[[], None] = lambda: None  # the device is given work …
    end: Callable[[], Any] = lambda: None  # … until here


class PooledExecutor:
    """Runs items in a pool until all are done, or it gives up; `left` has what is not done then.

    The figures are the run's own, and counted on.
    """

    def __init__(
        self, work: PoolWork, *, sizer: PoolSizer, memory: PoolMemory, figures: ExecutionFigures,
        policy: ExecutionPolicy,
    ) -> None:  # fmt: skip
        self.sizer = sizer
        self.left: list[int] = []
        self.trials: list[Probe] = []
        self.kv_bytes = 0  # the largest pool that has run
        self._work, self._memory, self._figures, self._policy = work, memory, figures, policy
        self._pool: ItemPool | None = None
        self._inside: set[int] = set()
        self._counted = (0, 0)  # of the pool, what the figures have already

    def run(self, items: Iterable[int]) -> Generator[list[Finished], None, None]:
        """Do the items, costliest first; what ends together is given out together."""
        costs = self._work.costs
        waiting = deque(sorted(items, key=lambda item: -costs[item]))
        try:
            with InterruptWatch() as interrupts:
                while (waiting or self._inside) and not self.sizer.hopeless:
                    interrupts.check()
                    if self.sizer.disturbed and self.sizer.return_after_others(self._memory.left_by_others_bytes()):
                        self._work.note("other processes have given memory back: the pool has its room again")
                    failure, finished = self._survived_turn(waiting)
                    if failure is not None:
                        self._after_failure(failure, waiting)
                    if finished:  # after a failure, too: what could not be prepared is neither waiting nor inside
                        yield finished
                    if failure is not None and failure.kind is not FailureKind.OUT_OF_MEMORY:
                        break
                    if not finished and self._pool is not None and not self._inside:
                        break  # not one could be admitted: batches take over
        finally:
            self._close()
        self.left = sorted((*waiting, *self._inside), key=lambda item: -costs[item])  # a pool without hope is left full
        self._inside.clear()

    def _survived_turn(self, waiting: deque[int]) -> tuple[Failure | None, list[Finished]]:
        """One turn; its failure, once the except block has ended and nothing pins the turn's tensors."""
        finished: list[Finished] = []
        started = time.perf_counter()
        try:
            self._turn(waiting, finished)
        except Exception as error:
            self._figures.lost_seconds += time.perf_counter() - started
            failure = survivable(error)
            if failure.kind is FailureKind.OTHER:  # nothing is known of it but its words
                failure = dataclasses.replace(failure, reason=f"{type(error).__name__}: {first_line(error)}")
            return failure, finished
        seconds = time.perf_counter() - started
        self._figures.seconds += seconds
        self._figures.busy_seconds += seconds
        return None, finished

    def _turn(self, waiting: deque[int], finished: list[Finished]) -> None:
        """Read prompts where rows are free, then make some steps."""
        if self._pool is None:
            self._pool = self._work.source.open(self.sizer.first_size(self._work.source.first_slots))
            self._counted = (0, 0)
        pool = self._pool
        results: list[PooledResult] = []
        with self._memory.metered(pool.tensors()) as reading:
            if waiting and self.sizer.refills(pool.active):
                self._refill(pool, waiting, finished)
            if self.sizer.measured:
                self._work.begin()
                results = pool.advance()
                self._work.end()
        if self._read_peak(pool, reading):
            self.sizer.halve_chunks()
            self._empty(waiting)
            return
        for one in results:
            self._inside.discard(one.item)
            finished.append(finished_item(one.item, one.result, one.shared_with))
        self._count(pool, results)

    def _refill(self, pool: ItemPool, waiting: deque[int], finished: list[Finished]) -> None:
        """Fill the pool, a portion at a time; where the next one is not ready, steps are made meanwhile."""
        began = time.perf_counter()
        while waiting and pool.active < self.sizer.rows:
            started = time.perf_counter()
            wanted = self._next_portion(pool, waiting)
            prepared = self._work.take(wanted)
            waited = time.perf_counter() - started
            all_admitted = self._admit(pool, wanted, prepared, waiting, finished)
            if not all_admitted or not self.sizer.measured:
                break
            if (waited > NOT_READY_SECONDS and self._work.ahead()) or time.perf_counter() - began > REFILL_SECONDS:
                break

    def _next_portion(self, pool: ItemPool, waiting: deque[int]) -> list[int]:
        """The next items to be admitted. They count as inside before anything can fail: then they wait again."""
        wanted: list[int] = []
        cost, most = 0, self.sizer.rows - pool.active
        while waiting and len(wanted) < most:
            cost += self._work.costs[waiting[0]]
            if wanted and cost > self._work.source.portion:
                break
            wanted.append(waiting.popleft())
            self._inside.add(wanted[-1])
        return wanted

    def _admit(
        self, pool: ItemPool, wanted: list[int], prepared: list[Any], waiting: deque[int], finished: list[Finished]
    ) -> bool:
        """Put prepared items into the pool; whether all found a place, those that failed aside."""
        good = []
        for item, one in zip(wanted, prepared, strict=True):
            if isinstance(one, NotPrepared):
                self._inside.discard(item)
                finished.append(_not_prepared(item, one, self._figures))
            else:
                good.append((item, one))
        self._work.begin()
        admitted = pool.admit([item for item, _ in good], [one for _, one in good])
        self._work.end()
        if admitted:
            self._figures.batch_counts.append(pool.active)
        for item, _ in reversed(good[admitted:]):
            self._inside.discard(item)
            waiting.appendleft(item)
        if self.sizer.measured:  # what is read first may be read again, in smaller chunks
            self._work.set_aside([item for item, _ in good[:admitted]])
        return admitted == len(good)

    def _read_peak(self, pool: ItemPool, reading: Any) -> bool:
        """Peaks of the turn; after the first, the size. Whether chunks must become smaller first."""
        self._figures.add_peak(reading)
        if not self.sizer.measured and pool.slot_bytes:
            self.sizer.record(slots=pool.slots, slot_bytes=pool.slot_bytes, peak_bytes=reading.peak_allocated_bytes)
            if self.sizer.crowded:
                return True
        if self.sizer.measured and pool.slots < (wanted := self.sizer.size.slots):
            with self._memory.metered(pool.tensors()):
                pool.grow(wanted)
        self.kv_bytes = max(self.kv_bytes, pool.slots * pool.slot_bytes)
        return False

    def _count(self, pool: ItemPool, results: Sequence[PooledResult]) -> None:
        figures = self._figures
        figures.items += len(results)
        figures.failed += sum(isinstance(one.result, ItemFailure) for one in results)
        figures.batches += 1
        computed, useful = self._counted
        figures.padded_cost += pool.computed - computed
        figures.cost += pool.useful - useful
        self._counted = (pool.computed, pool.useful)

    def _after_failure(self, failure: Failure, waiting: deque[int]) -> None:
        """A smaller pool takes over, or batches do."""
        inside, slots = len(self._inside), 0 if self._pool is None else self._pool.slots
        left = self._empty(waiting)
        if failure.kind is not FailureKind.OUT_OF_MEMORY:
            self._work.note(f"the pool ended with an error ({failure.reason}): batches take over")
            return
        self._figures.oom_events += 1
        self.trials.append(Probe(batch_size=max(inside, 1), cost=slots, verdict="oom", detail=failure.reason))
        if self._policy.fail_on_oom:
            raise DoesNotFitError(f"a pool of {inside} does not fit: {failure.reason} (fail on OOM was asked)")
        self.sizer.record_failure(left)
        if not self.sizer.hopeless:
            self._work.note(f"a pool of {inside} sequences ran out of memory: a smaller one takes over")

    def _empty(self, waiting: deque[int]) -> int | None:
        """Close the pool; what was in it waits again, in its place. What other processes left until then."""
        costs = self._work.costs
        ordered = sorted((*waiting, *self._inside), key=lambda item: -costs[item])
        self._inside.clear()
        waiting.clear()
        waiting.extend(ordered)
        self._close()
        left = self._memory.left_by_others_bytes()
        self._memory.release()
        return left

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.release()
            self._pool = None


def _not_prepared(item: int, one: NotPrepared, figures: ExecutionFigures) -> Finished:
    figures.items += 1
    figures.failed += 1
    figures.batch_counts.append(1)
    return finished_item(item, ItemFailure(reason="error", message=one.message), 1)
