"""The executor: every item once, whatever happens on the way.

Items run costliest first (`work_queue.py`). An out-of-memory error splits the batch and continues from the failed part;
an item that runs out of memory alone is set aside and tried again (`retries.py`); any other error of one item is found
by bisection and recorded with that item; a fatal error ends the run with what is finished in the journal. No finished
batch is computed again. Knows nothing of models, data or metrics: it runs a function on lists of item numbers.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from brim.errors import DoesNotFitError
from brim.memory.failures import Failure, FailureKind
from brim.records import Probe, Verdict
from brim.running.interrupts import InterruptWatch
from brim.running.results import ExecutionFigures, one_for_each
from brim.running.retries import Retries, survivable, wait
from brim.running.work_queue import WorkQueue, padded_cost
from brim.settings.sizes import format_bytes
from brim.sizing.live import LiveSizer
from brim.sizing.sizer import Trial

__all__ = [
    "BatchWork",
    "ExecutionPolicy",
    "Executor",
    "Finished",
    "ItemFailure",
    "PeakMemory",
    "Pending",
    "finished_item",
]

MAX_KEPT_TRIALS = 256  # batches that are remembered one by one
HOPELESS_AFTER = 3  # items that do not fit alone before the cheapest is tried

FailureReason = Literal["out_of_memory", "size_limit", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemFailure:
    """Why one item has no result."""

    reason: FailureReason
    message: str
    needed_bytes: int | None = None  # at least, for an item that does not fit
    attempts: int = 1  # how often it was tried alone

    def to_json(self) -> dict[str, Any]:
        """The failure as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """One item, done: its result, or why it has none."""

    item: int
    result: Any
    failure: ItemFailure | None
    batch_size: int


class Pending(abc.ABC):
    """A batch under way on the device: what a function gives back instead of results, so that the next one can start.

    As a `Future`, but the waiting is done where the results are needed, in the calling thread.
    """

    @abc.abstractmethod
    def result(self) -> Sequence[Any]:
        """Wait for the device; one result per item. An `ItemFailure` among them is recorded as that item's failure."""

    def busy_seconds(self) -> float | None:
        """How long the device worked on it, once the results are here; None: not known, and the clock decides.

        The clock also counts waiting for items to be prepared, which says nothing about the size.
        """
        return None


@dataclasses.dataclass(kw_only=True)
class _RunningBatch:
    """A batch that was started and not yet recorded."""

    batch: list[int]
    cost: int
    results: Sequence[Any] | Pending
    started: float
    reading: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Suspect:
    """A batch that failed with an error that names no size: if all its items run in smaller ones, size it was."""

    batch: list[int]
    cost: int
    left: set[int]
    error: str


class PeakMemory(Protocol):
    """What the executor needs of a device's memory; `brim.memory.devices.DeviceMemory` has it."""

    def metered(self) -> contextlib.AbstractContextManager[Any]:
        """Measure what runs inside."""

    def release(self, *, thorough: bool = True) -> None:
        """Give back what nothing refers to any more."""

    def left_by_others_bytes(self) -> int | None:
        """What other processes leave of the device now; None: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchWork:
    """What an executor runs, and whom it asks on the way.

    `launch` starts a batch of item numbers. Where it returns a `Pending`, the next batch is started before the last one
    is read, once the size has settled. `costs` has the cost of every item.
    """

    launch: Callable[[list[int]], Sequence[Any] | Pending]
    costs: Sequence[int]
    note: Callable[[str], None] | None = None  # is given a line for every step taken to survive
    set_aside: Callable[[list[int]], None] | None = None  # these items wait until all others have run
    last_resort: Callable[[], bool] | None = None  # an item does not fit alone; whether something was changed for it
    pause: Callable[[float], None] | None = None  # so many seconds, before the last try of items that do not fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionPolicy:
    """How an executor treats sizes and failures.

    With `by_count` the cap counts items, whatever they cost. With `fixed` it never moves: a batch that does not fit is
    halved until it does, and the next one has the full size again. With `stop_if_hopeless` the run ends when the first
    items do not fit alone, in all their tries, and the cheapest does not either; what was not tried is then neither
    done nor failed.
    """

    by_count: bool = False
    packed: bool = False  # a batch costs the sum of its items
    fixed: bool = False
    overlap: bool = True  # False: a batch is read before the next one is started
    fail_fast: bool = False  # raise the first error of a single item
    fail_on_oom: bool = False  # raise the first out-of-memory error
    stop_if_hopeless: bool = False


class Executor:
    """Runs work in batches until every item is done.

    Items are given out as soon as they end, so that a journal is never behind. With `memory`, a failed batch's memory
    is given back before the next try, and, if `metered`, every batch's peak is measured. An item that runs out of
    memory alone is set aside and tried again after the others, and once more after a pause; then comes the last resort.
    """

    def __init__(
        self,
        work: BatchWork,
        *,
        sizer: LiveSizer,
        memory: PeakMemory | None = None,
        metered: bool = True,
        policy: ExecutionPolicy | None = None,
        figures: ExecutionFigures | None = None,
    ) -> None:
        self.sizer = sizer
        self.figures = figures if figures is not None else ExecutionFigures()
        self.trials: list[Probe] = []  # the batches that the size was found by, and those that failed
        self._work = work
        self._policy = policy if policy is not None else ExecutionPolicy()
        self._costs = work.costs
        self._finished: list[Finished] = []  # not returned yet
        self._memory = memory
        self._meter_on = memory is not None and metered
        self._retries = Retries()
        self._by_others = True  # whether other processes may have caused the last failure
        self._failures_alone = 0  # items that did not fit alone, while nothing has fitted
        self._finished_at = 0.0
        self._suspects: list[_Suspect] = []

    def run(self, items: Iterable[int]) -> Generator[list[Finished], None, None]:
        """Do every item once, costliest first; items that end together are given out together, as soon as they end.

        Whoever stops before the end should close it (`contextlib.closing`): it watches for interrupts until then.
        """
        queue = WorkQueue(self._costs, items, by_count=self._policy.by_count, packed=self._policy.packed)
        with InterruptWatch() as interrupts:
            yield from self._run_all(queue, interrupts)
            while self._retries:
                yield from self._try_again(queue, interrupts)
                yield from self._run_all(queue, interrupts)
        if queue:
            self._note("not even the least costly sample fits alone: the others are not tried")

    def _run_all(self, queue: WorkQueue, interrupts: InterruptWatch) -> Iterator[list[Finished]]:
        """Batch by batch; one may still run on the device while the next is started."""
        running: _RunningBatch | None = None
        while (queue or running is not None) and not self._is_hopeless():
            interrupts.check()
            if self.sizer.disturbed and self.sizer.return_after_others(self._left_by_others()):
                self._note("other processes have given memory back: batches are as large as before again")
            following = self._start(queue, queue.take(self.sizer.next_size())) if queue else None
            yield from self._yield_finished()
            if running is not None:
                self._finish(queue, running)
                yield from self._yield_finished()
            running = following
            overlaps = self._policy.overlap and self.sizer.overlaps
            if running is not None and not (overlaps and isinstance(running.results, Pending)):
                self._finish(queue, running)
                running = None
                yield from self._yield_finished()

    def _try_again(self, queue: WorkQueue, interrupts: InterruptWatch) -> Iterator[list[Finished]]:
        """The items that were set aside, one by one: now that all others are done, and once more after a pause."""
        for last in (False, True):
            seconds = self._retries.next_pause() if last and self._retries else 0.0
            if seconds > 0:
                who = "1 sample does" if len(self._retries) == 1 else f"{len(self._retries)} samples do"
                self._note(f"{who} not fit alone: tried once more in {seconds:g} s")
                (self._work.pause or wait)(seconds)
            for item in self._retries.items:
                interrupts.check()
                if item in self._retries and (running := self._start(queue, [item])) is not None:
                    self._finish(queue, running)
                yield from self._yield_finished()

    def _yield_finished(self) -> Iterator[list[Finished]]:
        finished, self._finished = self._finished, []
        if finished:
            yield finished

    def _start(self, queue: WorkQueue, batch: list[int]) -> _RunningBatch | None:
        """Start a batch; None if it failed, which is handled here."""
        running: _RunningBatch | None = None
        failure, error = None, ""
        started = time.perf_counter()
        try:
            with self._metered() as reading:
                results = self._work.launch(batch)
            cost = self._weight(batch)
            running = _RunningBatch(batch=batch, cost=cost, results=results, started=started, reading=reading)
        except Exception as problem:
            failure, error = self._classified(problem, batch)
        if running is None:
            assert failure is not None
            self._clean_up(failure, started)  # the except block has ended: nothing pins the batch's tensors any more
            self._after_failure(queue, batch, failure, error)
        return running

    def _finish(self, queue: WorkQueue, running: _RunningBatch) -> None:
        """Wait for a batch, count it and record it."""
        batch, results = running.batch, running.results
        failure, error = None, ""
        busy: float | None = None
        try:
            if isinstance(results, Pending):
                pending, results = results, results.result()
                busy = pending.busy_seconds()
                del pending
        except Exception as problem:
            failure, error = self._classified(problem, batch)
        if failure is not None:
            started = max(running.started, self._finished_at)
            del running, results
            self._clean_up(failure, started)
            self._after_failure(queue, batch, failure, error)
            return
        assert not isinstance(results, Pending)
        results = one_for_each(results, len(batch))
        now = time.perf_counter()
        seconds, self._finished_at = now - max(running.started, self._finished_at), now
        failed = sum(isinstance(result, ItemFailure) for result in results)
        self.figures.seconds += seconds
        self._count(running, seconds if busy is None else busy, failed=failed)
        self._mark_ran(batch)
        self._finished += [finished_item(item, result, len(batch)) for item, result in zip(batch, results, strict=True)]

    def _classified(self, error: Exception, batch: list[int]) -> tuple[Failure, str]:
        """The kind of failure that an error is, and its message; raises what must not be survived."""
        failure = survivable(error)
        if self._policy.fail_fast and failure.kind in (FailureKind.OTHER, FailureKind.AMBIGUOUS) and len(batch) == 1:
            raise error
        return failure, f"{type(error).__name__}: {error}"

    def _after_failure(self, queue: WorkQueue, batch: list[int], failure: Failure, error: str) -> None:
        cost = self._weight(batch)
        smaller_helps = failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT, FailureKind.AMBIGUOUS)
        if smaller_helps:
            self._remember(batch, "oom" if failure.kind is FailureKind.OUT_OF_MEMORY else "size_limit", failure.reason)
            self.figures.oom_events += failure.kind is FailureKind.OUT_OF_MEMORY
            if self._policy.fail_on_oom and failure.kind is not FailureKind.AMBIGUOUS:
                raise DoesNotFitError(f"a batch of {len(batch)} does not fit: {failure.reason} (fail on OOM was asked)")
            if batch[0] in self._retries:
                pass  # it is tried again, alone: the sizer knows already
            elif self._policy.by_count and len(batch) == 1:
                self.sizer.blame_item()
            elif not self._policy.fixed:
                self.sizer.record(Trial(size=cost, verdict="oom"))
            if len(batch) > 1:
                self._note(f"a batch of {len(batch)} failed ({failure.reason}): its samples run again in smaller ones")
        elif len(batch) > 1:
            self._suspects.append(_Suspect(batch=batch, cost=cost, left=set(batch), error=error))
        if len(batch) == 1:
            self._failed_alone(queue, batch[0], failure, error)
        elif failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT) and not self._policy.fixed:
            queue.put_back(batch)
        else:
            queue.split(batch)

    def _failed_alone(self, queue: WorkQueue, item: int, failure: Failure, error: str) -> None:
        """Set the item aside for another try; after the last one, the last resort, or its failure is recorded."""
        out_of_memory = failure.kind is FailureKind.OUT_OF_MEMORY
        first = item not in self._retries
        if self._retries.failed(item, failure, by_others=self._by_others and not failure.own_limit):
            if first and self._work.set_aside is not None and self.figures.batches > 0:
                self._work.set_aside([item])
        elif out_of_memory and self._work.last_resort is not None and self._work.last_resort():
            self._failures_alone = 0
            queue.add([item, *self._retries.release()])
            return
        else:
            self._record_failure(item, failure, error)
        if first:
            self._failures_alone += out_of_memory and self.figures.batches == 0
            if self._policy.stop_if_hopeless and self._failures_alone == HOPELESS_AFTER and queue:
                queue.bring_cheapest()

    def _mark_ran(self, batch: list[int]) -> None:
        """These items ran. Where all of a suspect's have, in smaller batches, its size was the cause: stay below it."""
        for item in batch:
            self._retries.ran(item)
        for suspect in self._suspects:
            suspect.left.difference_update(batch)
        proven = [suspect for suspect in self._suspects if not suspect.left]
        if not proven:
            return
        smallest = min(proven, key=lambda suspect: suspect.cost)
        # The larger ones were split into it.
        self._suspects = [suspect for suspect in self._suspects if suspect.left and suspect.cost < smallest.cost]
        if not self._policy.fixed:
            self.sizer.record(Trial(size=smallest.cost, verdict="size_limit"))
        why = smallest.error.strip().splitlines()[0]
        self._remember(smallest.batch, "size_limit", why)
        self._note(f"a batch of {len(smallest.batch)} failed, and all its samples ran in smaller ones: {why}")

    def _is_hopeless(self) -> bool:
        """Whether the costliest and then the cheapest did not fit: nothing will."""
        return self._policy.stop_if_hopeless and self._failures_alone > HOPELESS_AFTER and self.figures.batches == 0

    def _record_failure(self, item: int, failure: Failure, error: str) -> None:
        self._suspects = [
            suspect for suspect in self._suspects if item not in suspect.left
        ]  # the item caused the error
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
        attempts = self._retries.attempts(item)
        given_up = ItemFailure(reason=reason, message=message, needed_bytes=needed, attempts=attempts)
        self._finished.append(Finished(item=item, result=None, failure=given_up, batch_size=1))

    def _count(self, running: _RunningBatch, seconds: float, *, failed: int) -> None:
        figures, batch, reading = self.figures, running.batch, running.reading
        figures.items += len(batch)
        figures.failed += failed
        figures.batches += 1
        figures.busy_seconds += seconds
        costs = [self._costs[item] for item in batch]
        whole = self._batch_cost(batch)
        figures.cost += sum(costs)
        figures.padded_cost += whole
        figures.largest_padded_cost = max(figures.largest_padded_cost, running.cost)
        figures.batch_counts.append(len(batch))
        if failed == len(batch):
            return  # none of it reached the device: that was quick, and says nothing of the size
        figures.add_batch_time(len(batch), whole, seconds)
        searching = not self.sizer.settled
        if not figures.warm_up_padded_cost:
            figures.warm_up_seconds, figures.warm_up_padded_cost = seconds, whole
        elif searching:
            figures.search_seconds += seconds
            figures.search_padded_cost += whole
            figures.best_search_rate = max(figures.best_search_rate, whole / max(seconds, 1e-9))
        if searching or not (self.trials and self.trials[-1].detail == "settled"):
            self._remember(batch, "fits", self.sizer.phase, seconds=seconds, reading=reading)
        peak = None
        if reading is not None:
            peak = reading.peak_reserved_bytes
            figures.add_peak(reading)
        self.sizer.record(Trial(size=running.cost, seconds=seconds, peak_bytes=peak, costliest_item=max(costs)))

    def _remember(
        self, batch: list[int], verdict: Verdict, detail: str, *, seconds: float | None = None, reading: Any = None
    ) -> None:
        """Keep a batch as evidence for the size; after it has settled, only the first and those that failed."""
        if len(self.trials) >= MAX_KEPT_TRIALS:
            return
        self.trials.append(
            Probe(
                batch_size=len(batch),
                cost=self._batch_cost(batch),
                verdict=verdict,
                peak_allocated_bytes=None if reading is None else reading.peak_allocated_bytes,
                peak_reserved_bytes=None if reading is None else reading.peak_reserved_bytes,
                step_seconds=seconds,
                samples_per_second=None if seconds is None else len(batch) / max(seconds, 1e-9),
                steps=0 if seconds is None else 1,
                detail=detail,
            )
        )

    def _weight(self, batch: list[int]) -> int:
        """The size of a batch in the unit of the cap."""
        return len(batch) if self._policy.by_count else self._batch_cost(batch)

    def _batch_cost(self, batch: list[int]) -> int:
        return padded_cost((self._costs[item] for item in batch), packed=self._policy.packed)

    @contextlib.contextmanager
    def _metered(self) -> Iterator[Any]:
        if self._memory is None or not self._meter_on:
            yield None
            return
        with self._memory.metered() as reading:
            yield reading

    def _clean_up(self, failure: Failure, started: float) -> None:
        """Give a failed batch's memory back. That takes a third of a second: an error of other kinds can do without.

        Before that it is noted whether other processes held the memory, or may have where that cannot be read.
        """
        if self._memory is not None and failure.kind is not FailureKind.OTHER:
            left = self._left_by_others()
            self._by_others = left is None or self.sizer.evidence.others_hold(left)
            self.sizer.note_others(left)
            self._memory.release()
        self.figures.lost_seconds += time.perf_counter() - started

    def _note(self, line: str) -> None:
        if self._work.note is not None:
            self._work.note(line)

    def _left_by_others(self) -> int | None:
        return None if self._memory is None else self._memory.left_by_others_bytes()


def finished_item(item: int, result: Any, batch_size: int) -> Finished:
    """An item as it ended: its result, or the failure that stands in the result's place."""
    if isinstance(result, ItemFailure):
        return Finished(item=item, result=None, failure=result, batch_size=batch_size)
    return Finished(item=item, result=result, failure=None, batch_size=batch_size)
