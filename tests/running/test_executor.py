"""The batches a size was found by, and what finding it cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.memory.devices import MemoryReading
from brim.running.executor import (
    HOPELESS_AFTER,
    MAX_KEPT_TRIALS,
    BatchWork,
    ExecutionPolicy,
    Executor,
    Finished,
    ItemFailure,
    Pending,
)
from brim.running.results import ExecutionFigures
from brim.running.work_queue import WorkQueue, padded_cost
from brim.sizing.live import LiveSizer


def executed(count: int, sizer: LiveSizer, *, fits: int = 1000) -> Executor:
    def function(items: list[int]) -> list[int]:
        if len(items) > fits:
            raise MemoryError
        return items

    executor = Executor(BatchWork(launch=function, costs=[1] * count), sizer=sizer)
    list(executor.run(range(count)))
    return executor


def test_every_batch_until_the_size_settled_is_kept_and_one_after() -> None:
    executor = executed(100, LiveSizer(first=4, ceiling=16, grows=False))
    assert [(trial.batch_size, trial.detail) for trial in executor.trials] == [
        (4, "rising"),
        (8, "rising"),
        (16, "settled"),
    ]
    assert all(trial.fits and trial.cost == trial.batch_size for trial in executor.trials)
    assert executor.figures.search_padded_cost == 8  # and 4 to warm up


def test_batches_that_failed_are_kept_with_their_reason() -> None:
    executor = executed(100, LiveSizer(first=16, ceiling=16, grows=False), fits=10)
    verdicts = [(trial.batch_size, trial.verdict) for trial in executor.trials]
    assert verdicts[0] == (16, "oom")
    assert verdicts[1] == (8, "fits")
    assert executor.trials[0].samples_per_second is None
    assert "memory" in executor.trials[0].detail
    assert executor.figures.lost_seconds > 0


def test_an_unsettled_run_keeps_a_bounded_number_of_trials() -> None:
    failing = Executor(
        BatchWork(
            launch=lambda items: (_ for _ in ()).throw(MemoryError) if len(items) > 1 else items, costs=[1] * 3000
        ),
        sizer=LiveSizer(first=2, ceiling=2, grows=False),
        policy=ExecutionPolicy(fixed=True),
    )
    list(failing.run(range(3000)))
    assert failing.figures.oom_events > MAX_KEPT_TRIALS
    assert len(failing.trials) == MAX_KEPT_TRIALS


class RetryingMemory:
    """A device whose allocator has to try again twice in every batch."""

    @contextlib.contextmanager
    def metered(self) -> Iterator[MemoryReading]:
        yield MemoryReading(peak_allocated_bytes=1, peak_reserved_bytes=2, alloc_retries=2)

    def left_by_others_bytes(self) -> int | None:
        return None

    def release(self, *, thorough: bool = True) -> None:
        pass


@pytest.mark.parametrize(("counted", "expected"), [(0, 6), (None, None)])
def test_allocator_retries_are_added_up_where_the_device_counts_them(counted: int | None, expected: int | None) -> None:
    work = BatchWork(launch=lambda items: items, costs=[1] * 12)
    sizer = LiveSizer(first=4, ceiling=4, grows=False)
    executor = Executor(work, sizer=sizer, memory=RetryingMemory(), metered=True)
    executor.figures.alloc_retries = counted
    list(executor.run(range(12)))
    assert executor.figures.batches == 3
    assert executor.figures.alloc_retries == expected


def test_search_time_is_the_first_batches_excess_over_the_later_rate() -> None:
    figures = ExecutionFigures(busy_seconds=20.0, padded_cost=1000, search_seconds=10.0, search_padded_cost=200)
    # 800 in 10 s afterwards: the first 200 would have taken 2.5 s
    assert figures.planning_seconds == pytest.approx(7.5)
    lost = ExecutionFigures(busy_seconds=10.0, padded_cost=1000, lost_seconds=3.0)
    assert lost.planning_seconds == pytest.approx(3.0)
    never = ExecutionFigures(
        busy_seconds=10.0, padded_cost=200, search_seconds=10.0, search_padded_cost=200, best_search_rate=40.0
    )
    assert never.planning_seconds == pytest.approx(5.0)
    assert ExecutionFigures().planning_seconds == 0.0


class Timed(Pending):
    """Results that took the device a part of the time that was spent on them."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def result(self) -> list[int]:
        return self.items

    def busy_seconds(self) -> float:
        return 0.25


def test_device_time_excludes_waiting_for_items() -> None:
    executor = Executor(BatchWork(launch=Timed, costs=[1] * 40), sizer=LiveSizer(first=10, ceiling=10, grows=False))
    list(executor.run(range(40)))
    assert executor.figures.busy_seconds == 4 * 0.25
    assert executor.figures.seconds < 1.0  # what it really took, for whoever watches
    assert [trial.samples_per_second for trial in executor.trials] == [40.0]


def rejecting(
    most: int, *, bad: int | None = None, error: str = "a kernel of another library: no"
) -> Callable[..., Any]:
    """A function with a limit that nothing here knows by name, and perhaps one item that it cannot do at all."""

    def function(items: list[int]) -> list[int]:
        if len(items) > most or bad in items:
            raise RuntimeError(error)
        return items

    return function


def run_rejecting(function: Callable[..., Any], *, first: int, count: int = 200) -> tuple[Executor, list[str]]:
    notes: list[str] = []
    sizer = LiveSizer(first=first, ceiling=first, known=True)
    executor = Executor(BatchWork(launch=function, costs=[1] * count, note=notes.append), sizer=sizer)
    list(executor.run(range(count)))
    return executor, notes


def test_an_error_that_smaller_batches_avoid_is_blamed_on_the_size() -> None:
    executor, notes = run_rejecting(rejecting(20), first=32)
    assert executor.figures.items == 200
    assert executor.figures.failed == 0
    assert max(executor.figures.batch_counts) <= 20
    assert len(executor.figures.batch_counts) < 24  # the size that failed is not tried again and again
    assert any(trial.verdict == "size_limit" and trial.batch_size == 32 for trial in executor.trials)
    assert len(notes) == 2  # 32, and what it later came back to: 24
    assert "a batch of 32 failed" in notes[0]
    assert "a kernel of another library" in notes[0]


def test_an_unknown_error_of_one_item_is_not_taken_for_a_limit_of_size() -> None:
    executor, notes = run_rejecting(rejecting(1000, bad=7), first=32)
    assert executor.figures.items == 200
    assert executor.figures.failed == 1
    assert not notes
    assert max(executor.figures.batch_counts[-3:]) == 32  # the others go on as before


def test_a_batch_whose_halves_fail_as_well_does_not_lower_the_cap_twice() -> None:
    executor, _ = run_rejecting(rejecting(9), first=32)
    assert executor.figures.failed == 0
    assert max(executor.figures.batch_counts) <= 9
    assert executor.sizer.size >= 4
    assert next(trial.batch_size for trial in executor.trials if trial.verdict == "size_limit") == 16


def test_the_first_batch_is_not_counted_as_search_time() -> None:
    figures = ExecutionFigures(
        busy_seconds=28.0, padded_cost=1010, warm_up_seconds=8.0, warm_up_padded_cost=10, search_seconds=10.0,
        search_padded_cost=200,
    )  # fmt: skip
    assert figures.planning_seconds == pytest.approx(7.5)
    executor = executed(100, LiveSizer(first=4, ceiling=16, grows=False))
    assert executor.figures.warm_up_padded_cost == 4
    assert executor.figures.search_padded_cost == 8


def test_a_batch_in_which_nothing_ran_is_no_evidence() -> None:
    """Two unreadable pictures come first: they took no time, and no later batch is ever as fast."""

    class Slow(Pending):
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def result(self) -> list[Any]:
            return [ItemFailure(reason="error", message="unreadable") if item < 2 else item for item in self.items]

        def busy_seconds(self) -> float:
            return 1e-6 if max(self.items) < 2 else 0.1 + 0.001 * len(self.items)

    executor = Executor(BatchWork(launch=Slow, costs=[1] * 400), sizer=LiveSizer(first=2))
    list(executor.run(range(400)))
    assert executor.figures.failed == 2
    assert max(executor.figures.batch_counts) > 30


def run(fits: int, *, stop_if_hopeless: bool) -> tuple[list[Finished], list[int], list[str]]:
    """Items cost their number; those above `fits` do not fit, even alone."""
    tried: list[int] = []
    notes: list[str] = []

    def launch(batch: list[int]) -> list[int]:
        tried.extend(batch)
        if max(batch) > fits:
            raise MemoryError
        return batch

    executor = Executor(
        BatchWork(launch=launch, costs=list(range(50)), note=notes.append),
        sizer=LiveSizer(first=50),
        policy=ExecutionPolicy(stop_if_hopeless=stop_if_hopeless),
    )
    done = [one for some in executor.run(range(50)) for one in some]
    return done, tried, notes


def test_it_ends_after_the_costliest_and_the_least_costly() -> None:
    done, tried, notes = run(-1, stop_if_hopeless=True)
    assert [one.item for one in done] == [49, 48, 47, 0]
    assert len(done) == HOPELESS_AFTER + 1
    assert all(one.failure is not None and one.failure.reason == "out_of_memory" for one in done)
    assert set(tried) == {49, 48, 47, 0}
    assert "not even the least costly" in notes[-1]


@pytest.mark.parametrize("fits", [0, 5])
def test_it_continues_when_the_cheapest_fits(fits: int) -> None:
    done, _, _ = run(fits, stop_if_hopeless=True)
    assert sorted(one.item for one in done) == list(range(50))
    assert sorted(one.item for one in done if one.failure is None) == list(range(fits + 1))


def test_unless_asked_every_item_is_tried() -> None:
    done, _, _ = run(-1, stop_if_hopeless=False)
    assert sorted(one.item for one in done) == list(range(50))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 500))
def test_every_item_is_taken_once_costliest_first_within_the_cap(costs: list[int], cap: int) -> None:
    queue = WorkQueue(costs, range(len(costs)))
    taken: list[int] = []
    while queue:
        batch = queue.take(cap)
        assert padded_cost(costs[item] for item in batch) <= cap or len(batch) == 1
        taken += batch
    assert sorted(taken) == list(range(len(costs)))
    assert [costs[item] for item in taken] == sorted(costs, reverse=True)


def test_equal_costs_keep_the_callers_order() -> None:
    assert WorkQueue([5] * 4, [2, 0, 3, 1]).take(100) == [2, 0, 3, 1]


def test_a_batch_put_back_comes_next_in_the_same_order() -> None:
    queue = WorkQueue([1] * 6, range(6))
    queue.put_back(queue.take(4))
    assert queue.take(2) == [0, 1]
    assert queue.take(9) == [2, 3, 4, 5]


def test_halves_of_a_spoilt_batch_run_before_the_rest_and_as_they_are() -> None:
    queue = WorkQueue([1] * 6, range(6))
    queue.split(queue.take(4))
    assert queue.take(1) == [0, 1]
    assert queue.take(1) == [2, 3]
    assert queue.take(9) == [4, 5]


def test_padded_cost_is_the_number_times_the_costliest() -> None:
    assert padded_cost([3, 7, 5]) == 21
    assert padded_cost([]) == 0


def test_the_cheapest_item_can_be_brought_forward() -> None:
    queue = WorkQueue([5, 9, 1, 7], range(4))
    queue.bring_cheapest()
    assert queue.take(100) == [2]
    assert queue.take(100) == [1, 3, 0]
