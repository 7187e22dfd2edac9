"""One size against a larger one: what is asked for next, and what is made of the rates."""

from __future__ import annotations

import pytest

from brim.sizing.comparison import Drifting, Next, RateComparison, Steady
from brim.sizing.constants import EARLY_COMPARED_BATCHES


def told(comparison: RateComparison, *rates: float, seconds: float = 1.0) -> list[Next]:
    steps = []
    for rate in rates:
        comparison.timed(seconds)
        steps.append(comparison.compare(rate))
    return steps


def test_a_drifting_rate_is_compared_with_those_before_and_after() -> None:
    comparison = Drifting()
    assert told(comparison, 100, 104, 106, 104) == ["larger", "larger", "this", "keep"]  # 106 of 102 on the way
    assert told(comparison, 106, 109, 110, 110) == ["larger", "larger", "this", "refuse"]  # 110 of 108: all drift
    assert comparison.usual == 108


def test_a_faster_size_is_kept_after_one_good_trial() -> None:
    comparison = Steady()
    assert told(comparison, 100, 104, 106, 108) == ["larger", "keep", "larger", "keep"]
    assert comparison.before == 108


def test_a_larger_size_is_refused_if_it_is_no_faster() -> None:
    comparison = Steady()
    assert told(comparison, 100, 101, 102, 101, seconds=2.0) == ["larger", "larger", "this", "refuse"]
    assert comparison.usual == 101


def test_a_size_that_became_faster_is_compared_again() -> None:
    comparison = Steady()
    assert told(comparison, 100, 90, 90, 110, seconds=2.0) == ["larger", "larger", "this", "larger"]
    assert comparison.before == 110
    assert told(comparison, 90, 90, 120, 90, 90, 130, seconds=2.0)[-1] == "refuse"  # it will not go on for ever


@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_in_the_first_seconds_a_larger_size_has_more_trials(seconds: float) -> None:
    comparison = Steady()
    steps = told(comparison, 100, *[90.0] * EARLY_COMPARED_BATCHES, seconds=seconds)
    assert steps.index("this") == (EARLY_COMPARED_BATCHES if seconds < 0.1 else 2)


def test_a_comparison_with_a_known_rate_needs_no_trial_of_this_size() -> None:
    comparison = Steady()
    comparison.begin(100.0)
    assert told(comparison, 110) == ["keep"]
