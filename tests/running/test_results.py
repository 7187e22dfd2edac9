"""What is counted over the batches of a run, and how the curves of several processes become one."""

from __future__ import annotations

import itertools

import pytest

from brim.running.results import (
    MOST_BATCH_TIMES,
    MOST_CURVE_POINTS,
    ExecutionFigures,
    ThroughputCurve,
    merge_curves,
)


@pytest.mark.parametrize("batches", [1, 99, 100, 101, 199, 200, 1000, 12_345])
def test_a_curve_stays_small_and_ends_where_the_run_ended(batches: int) -> None:
    curve = ThroughputCurve()
    for batch in range(1, batches + 1):
        curve.add(0.5 * batch, 8 * batch)
    points = curve.points()
    assert min(batches, MOST_CURVE_POINTS // 2) <= len(points) <= MOST_CURVE_POINTS
    assert points[-1] == (0.5 * batches, 8 * batches)
    steps = {later[1] - earlier[1] for earlier, later in itertools.pairwise(points[:-1])}
    assert len(steps) <= 1, "equally far apart, but for the last"


def test_a_curve_without_batches_has_no_points() -> None:
    assert ThroughputCurve().points() == ()
    assert merge_curves([(), ()]) == []


def test_curves_of_processes_side_by_side_are_added_up() -> None:
    first, second = [(1.0, 4), (3.0, 8)], [(2.0, 5), (4.0, 10)]
    assert merge_curves([first, second]) == [[1.0, 4], [2.0, 9], [3.0, 13], [4.0, 18]]
    many = [[(0.1 * step, step) for step in range(1, 100)] for _ in range(8)]
    merged = merge_curves(many)
    assert len(merged) <= MOST_CURVE_POINTS
    assert merged[-1][1] == 8 * 99


def test_batch_times_leave_out_the_first_and_stay_few_over_the_whole_run() -> None:
    figures = ExecutionFigures()
    for number in range(1, 5001):
        figures.batches = number
        figures.add_batch_time(8, number, 0.1)
    costs = [cost for _, cost, _ in figures.batch_times]
    assert min(costs) > 1, "the first batch warms up"
    assert MOST_BATCH_TIMES // 2 <= len(costs) <= MOST_BATCH_TIMES
    assert max(costs) > 4900
    assert len({later - earlier for earlier, later in itertools.pairwise(costs)}) == 1, "equally far apart"
