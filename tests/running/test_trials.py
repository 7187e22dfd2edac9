"""The batches a size was found by, and what finding it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brim.running.executor import MOST_TRIALS, Executor, ItemFailure, Pending
from brim.running.figures import ExecutionFigures
from brim.sizing.live import LiveSizer


def executed(count: int, sizer: LiveSizer, *, fits: int = 1000) -> Executor:
    def function(items: list[int]) -> list[int]:
        if len(items) > fits:
            raise MemoryError
        return items

    executor = Executor(function, [1] * count, sizer=sizer)
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


def test_a_run_that_never_settles_down_does_not_fill_memory_with_its_trials() -> None:
    failing = Executor(
        lambda items: (_ for _ in ()).throw(MemoryError) if len(items) > 1 else items,
        [1] * 3000,
        sizer=LiveSizer(first=2, ceiling=2, grows=False),
        fixed=True,
    )
    list(failing.run(range(3000)))
    assert failing.figures.oom_events > MOST_TRIALS
    assert len(failing.trials) == MOST_TRIALS


def test_finding_the_size_costs_what_the_first_batches_took_beyond_the_later_rate() -> None:
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


def test_where_the_device_says_how_long_it_took_waiting_for_items_does_not_count() -> None:
    executor = Executor(Timed, [1] * 40, sizer=LiveSizer(first=10, ceiling=10, grows=False))
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
    told: list[str] = []
    sizer = LiveSizer(first=first, ceiling=first, known=True)
    executor = Executor(function, [1] * count, sizer=sizer, tell=told.append)
    list(executor.run(range(count)))
    return executor, told


def test_an_unknown_error_whose_items_all_run_in_smaller_batches_was_their_number() -> None:
    executor, told = run_rejecting(rejecting(20), first=32)
    assert executor.figures.items == 200
    assert executor.figures.failed == 0
    assert max(executor.figures.batch_counts) <= 20
    assert len(executor.figures.batch_counts) < 24  # the size that failed is not tried again and again
    assert any(trial.verdict == "size_limit" and trial.batch_size == 32 for trial in executor.trials)
    assert len(told) == 2  # 32, and what it later came back to: 24
    assert "a batch of 32 failed" in told[0]
    assert "a kernel of another library" in told[0]


def test_an_unknown_error_of_one_item_is_not_taken_for_a_limit_of_size() -> None:
    executor, told = run_rejecting(rejecting(1000, bad=7), first=32)
    assert executor.figures.items == 200
    assert executor.figures.failed == 1
    assert not told
    assert max(executor.figures.batch_counts[-3:]) == 32  # the others go on as before


def test_a_batch_whose_halves_fail_as_well_does_not_lower_the_cap_twice() -> None:
    executor, _ = run_rejecting(rejecting(9), first=32)
    assert executor.figures.failed == 0
    assert max(executor.figures.batch_counts) <= 9
    assert executor.sizer.size >= 4
    assert next(trial.batch_size for trial in executor.trials if trial.verdict == "size_limit") == 16


def test_the_first_batch_takes_long_whatever_its_size_and_is_not_the_cost_of_finding_one() -> None:
    figures = ExecutionFigures(
        busy_seconds=28.0, padded_cost=1010, warm_up_seconds=8.0, warm_up_padded_cost=10, search_seconds=10.0,
        search_padded_cost=200,
    )  # fmt: skip
    assert figures.planning_seconds == pytest.approx(7.5)
    executor = executed(100, LiveSizer(first=4, ceiling=16, grows=False))
    assert executor.figures.warm_up_padded_cost == 4
    assert executor.figures.search_padded_cost == 8


def test_a_batch_of_which_nothing_ran_says_nothing_about_its_size() -> None:
    """Two unreadable pictures come first: they took no time, and no later batch is ever as fast."""

    class Slow(Pending):
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def result(self) -> list[Any]:
            return [ItemFailure(reason="error", message="unreadable") if item < 2 else item for item in self.items]

        def busy_seconds(self) -> float:
            return 1e-6 if max(self.items) < 2 else 0.1 + 0.001 * len(self.items)

    executor = Executor(Slow, [1] * 400, sizer=LiveSizer(first=2))
    list(executor.run(range(400)))
    assert executor.figures.failed == 2
    assert max(executor.figures.batch_counts) > 30
