"""The batches a size was found by, and what finding it cost."""

from __future__ import annotations

import pytest

from brim.execute.executor import MOST_TRIALS, Executor
from brim.execute.figures import ExecutionFigures
from brim.execute.governor import Governor


def executed(count: int, governor: Governor, *, fits: int = 1000) -> Executor:
    def function(items: list[int]) -> list[int]:
        if len(items) > fits:
            raise MemoryError
        return items

    executor = Executor(function, [1] * count, governor=governor, record=lambda batch: None)
    executor.run(range(count))
    return executor


def test_every_batch_until_the_size_settled_is_kept_and_one_after() -> None:
    executor = executed(100, Governor(first=4, ceiling=16, grows=False))
    assert [(trial.batch_size, trial.detail) for trial in executor.trials] == [
        (4, "rising"),
        (8, "rising"),
        (16, "settled"),
    ]
    assert all(trial.fits and trial.cost == trial.batch_size for trial in executor.trials)
    assert executor.figures.search_padded_cost == 12


def test_batches_that_failed_are_kept_with_their_reason() -> None:
    executor = executed(100, Governor(first=16, ceiling=16, grows=False), fits=10)
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
        governor=Governor(first=2, ceiling=2, grows=False),
        record=lambda batch: None,
        fixed=True,
    )
    failing.run(range(3000))
    assert failing.figures.oom_events > MOST_TRIALS
    assert len(failing.trials) == MOST_TRIALS


def test_finding_the_size_costs_what_the_first_batches_took_beyond_the_later_rate() -> None:
    figures = ExecutionFigures(seconds=20.0, padded_cost=1000, search_seconds=10.0, search_padded_cost=200)
    # 800 in 10 s afterwards: the first 200 would have taken 2.5 s
    assert figures.planning_seconds == pytest.approx(7.5)
    lost = ExecutionFigures(seconds=10.0, padded_cost=1000, lost_seconds=3.0)
    assert lost.planning_seconds == pytest.approx(3.0)
    never = ExecutionFigures(
        seconds=10.0, padded_cost=200, search_seconds=10.0, search_padded_cost=200, best_search_rate=40.0
    )
    assert never.planning_seconds == pytest.approx(5.0)
    assert ExecutionFigures().planning_seconds == 0.0
