"""Speed-ups with their intervals: what repeated measurements show, and what they leave open."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from brim.intervals import Interval, curve_speed_up, paired_speed_up, segment_seconds, speed_up


def test_a_repeated_gain_is_clear_and_its_interval_holds_it() -> None:
    found = speed_up([100, 102, 98], [200, 206, 195])
    assert found.clear
    assert found.low < 2.0 < found.high
    assert found.text().startswith("2.00× (")


def test_equal_rates_are_not_clear() -> None:
    found = speed_up([100, 104, 97], [101, 98, 103])
    assert not found.clear
    assert "not clear" in found.text()


def test_one_measurement_is_never_clear() -> None:
    for before, after in (([100], [300]), ([100, 101], [300]), ([100], [300, 301])):
        found = speed_up(before, after)
        assert (found.low, found.high, found.clear) == (None, None, False)
        assert found.value == pytest.approx(3, rel=0.02)


def test_intervals_cover_the_true_ratio_about_nineteen_times_in_twenty() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        before = [100 * math.exp(draw.gauss(0, 0.1)) for _ in range(4)]
        after = [150 * math.exp(draw.gauss(0, 0.03)) for _ in range(4)]
        found = speed_up(before, after)
        covered += found.low <= 1.5 <= found.high
    assert 0.92 <= covered / 400 <= 0.99


def test_parts_of_the_same_work_are_compared_in_pairs() -> None:
    """Later parts are cheaper in both runs, which says nothing of the ratio between the runs."""
    before = [10.0, 8.0, 6.0, 4.0, 2.0]
    after = [seconds / 1.5 * wobble for seconds, wobble in zip(before, (1.01, 0.99, 1.02, 0.98, 1.0), strict=True)]
    found = paired_speed_up(before, after)
    assert found.clear
    assert found.low < 1.5 < found.high
    assert not speed_up([1 / one for one in before], [1 / one for one in after]).clear


def test_segments_are_equal_parts_of_the_samples() -> None:
    curve = [(step, step * 10) for step in range(1, 21)]
    assert segment_seconds(curve, 10) == pytest.approx([2.0] * 10)
    slower = [(seconds if seconds <= 10 else 10 + 3 * (seconds - 10), done) for seconds, done in curve]
    found = segment_seconds(slower, 10)
    assert sum(found) == pytest.approx(40)
    assert statistics.fmean(found[5:]) == pytest.approx(3 * statistics.fmean(found[:5]))


@pytest.mark.parametrize(
    "curve", [[], [(1, 5)], [(1, 0)] * 20, [(0, 1)] * 20], ids=["none", "short", "empty", "no time"]
)
def test_a_curve_that_shows_no_parts_has_none(curve: list[tuple[float, float]]) -> None:
    assert segment_seconds(curve, 10) == []


def test_an_interval_as_json_says_whether_it_is_clear() -> None:
    assert Interval(value=2.0, low=1.5, high=2.5, measurements=3).to_json() == {
        "value": 2.0, "low": 1.5, "high": 2.5, "measurements": 3, "clear": True,
    }  # fmt: skip


def test_one_measurement_against_many_parts_is_covered_by_their_spread() -> None:
    """The short run's time is as far off as a part of the long one may be: at a spread above the least one."""
    draw = random.Random(1)
    covered = 0
    for _ in range(400):
        parts = [math.exp(draw.gauss(0, 0.5)) for _ in range(10)]
        off = math.exp(draw.gauss(0, 0.5))
        curve = [[sum(parts[: place + 1]), 10.0 * (place + 1)] for place in range(10)]
        usual = 10 * math.exp(0.5**2 / 2)  # what ten parts take in the mean
        found, paired = curve_speed_up(curve, [[usual / 8 * off, 100.0]])
        assert found is not None
        assert not paired
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 8 <= found.high
    assert covered >= 0.93 * 400


def test_curves_of_other_work_or_without_parts_give_no_interval() -> None:
    many = [[float(place), 10.0 * place] for place in range(1, 21)]
    assert curve_speed_up(many, [[1.0, 100.0]]) == (None, False), "half of the samples"
    assert curve_speed_up([[20.0, 200.0]], [[1.0, 200.0]]) == (None, False), "no parts at all"
    assert curve_speed_up(many, []) == (None, False)
    found, paired = curve_speed_up(many, many)
    assert paired
    assert found is not None
    assert found.value == pytest.approx(1)
