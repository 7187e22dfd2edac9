"""Recommendations from points, and what they may never be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.profiling.pareto import Candidate, cheapest_meeting, cheapest_within, pareto_front

FIGURES = st.floats(0, 1, allow_nan=False).map(lambda value: round(value, 2))
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        values=st.just({}),
        accuracy=FIGURES,
        cost=FIGURES.map(lambda value: value + 0.01),
        latency_ms=st.none() | FIGURES,
        memory_bytes=st.none() | st.integers(0, 100),
    ),
    max_size=20,
)


def point(crops: int, accuracy: float, cost: float, **more: float) -> Candidate:
    return Candidate(values={"max_crops": crops}, accuracy=accuracy, cost=cost, **more)  # type: ignore[arg-type]


PROFILE = [point(2, 0.60, 1.0), point(4, 0.78, 2.0), point(6, 0.775, 3.0), point(8, 0.80, 4.0), point(12, 0.804, 8.0)]


def test_a_point_that_costs_more_and_is_worse_is_not_on_the_front() -> None:
    assert [one.values["max_crops"] for one in pareto_front(PROFILE)] == [2, 4, 8, 12]


def test_the_cheapest_point_within_the_fraction_is_chosen_with_its_savings() -> None:
    recommendation = cheapest_within(PROFILE, 0.01)
    assert recommendation is not None
    assert recommendation.candidate.values == {"max_crops": 8}
    assert "50% less cost" in recommendation.reason
    wide = cheapest_within(PROFILE, 0.05)
    assert wide is not None
    assert wide.candidate.values == {"max_crops": 4}


def test_nothing_within_means_the_best_itself() -> None:
    recommendation = cheapest_within(PROFILE, 0.0)
    assert recommendation is not None
    assert recommendation.candidate.values == {"max_crops": 12}
    assert "nothing cheaper" in recommendation.reason


def test_equal_accuracy_keeps_the_point_with_smaller_values() -> None:
    noisy = [point(12, 0.5, 1.0), point(2, 0.5, 1.3), point(4, 0.5, 1.1), point(1, 0.2, 0.9)]
    assert [one.values["max_crops"] for one in pareto_front(noisy)] == [1, 2]
    chosen = cheapest_within(noisy, 0.01)
    assert chosen is not None
    assert chosen.candidate.values == {"max_crops": 2}
    assert "smallest of the 3 points" in chosen.reason
    words = [Candidate(values={"dtype": name, "size": size}, accuracy=0.5, cost=cost)
             for name, size, cost in (("float32", 2, 2.0), ("bfloat16", 3, 1.0))]  # fmt: skip
    assert [one.values["dtype"] for one in pareto_front(words)] == ["bfloat16"], "words have no order: cost decides"


def test_bounds_pick_the_most_accurate_that_keeps_to_them() -> None:
    points = [point(2, 0.6, 1, latency_ms=20, memory_bytes=10), point(4, 0.7, 2, latency_ms=40, memory_bytes=30),
              point(8, 0.8, 4, memory_bytes=20)]  # fmt: skip
    fast = cheapest_meeting(points, latency_ms=50)
    assert fast is not None
    assert fast.candidate.values == {"max_crops": 4}  # 8 has no known latency
    small = cheapest_meeting(points, memory_bytes=20)
    assert small is not None
    assert small.candidate.values == {"max_crops": 8}
    assert cheapest_meeting(points, latency_ms=10) is None


def test_no_points_no_advice() -> None:
    assert pareto_front([]) == []
    assert cheapest_within([]) is None


@given(CANDIDATES)
def test_no_point_of_the_front_is_beaten_and_every_other_is(candidates: list[Candidate]) -> None:
    front = pareto_front(candidates)

    def beats(one: Candidate, other: Candidate) -> bool:
        as_good = one.accuracy >= other.accuracy and one.cost <= other.cost
        return as_good and (one.accuracy > other.accuracy or one.cost < other.cost)

    assert not any(beats(one, other) for one in candidates for other in front)
    figures = [(one.accuracy, one.cost) for one in front]
    assert all(
        any(beats(one, other) for one in front) or (other.accuracy, other.cost) in figures for other in candidates
    )


@given(CANDIDATES, st.sampled_from([0.0, 0.01, 0.1]))
def test_the_recommended_point_is_on_the_pareto_front(candidates: list[Candidate], fraction: float) -> None:
    recommendation = cheapest_within(candidates, fraction)
    if recommendation is None:
        assert candidates == []
        return
    best = max(one.accuracy for one in candidates)
    assert recommendation.candidate.accuracy >= (1 - fraction) * best
    assert not any(
        one.cost < recommendation.candidate.cost for one in candidates if one.accuracy >= (1 - fraction) * best
    )


@pytest.mark.parametrize("bound", [0.2, 0.8])
@given(candidates=CANDIDATES)
def test_a_bound_is_never_passed(bound: float, candidates: list[Candidate]) -> None:
    recommendation = cheapest_meeting(candidates, latency_ms=bound)
    if recommendation is not None:
        assert recommendation.candidate.latency_ms is not None
        assert recommendation.candidate.latency_ms <= bound
