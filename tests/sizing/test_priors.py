"""First guesses from runs under other knob values, and from forecasts."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from brim.records import Probe
from brim.sizing.priors import AvailableMemory, ForecastBytes, Prior

MIB = 2**20


def trial(items: int, item_cost: int, each: float, *, resident: int = 0, verdict: str = "fits") -> Probe:
    peak = round(resident + items * each)
    return Probe(batch_size=items, cost=items * item_cost, verdict=verdict, peak_allocated_bytes=peak)  # type: ignore[arg-type]


def fitting(trials: tuple[Probe, ...], item_cost: int, *, limit: int = 1000 * MIB, resident: int = 0) -> int | None:
    return Prior(trials=trials).fitting_items(
        AvailableMemory(limit_bytes=limit, resident_bytes=resident, item_cost=item_cost)
    )


def test_without_bytes_there_is_no_guess() -> None:
    assert fitting((), 100) is None
    unmeasured = Probe(batch_size=8, cost=800, verdict="fits")
    assert fitting((unmeasured,), 100) is None
    assert fitting((trial(8, 100, MIB, verdict="oom"),), 100) is None


def test_what_is_resident_is_no_items_bytes() -> None:
    light = trial(10, 100, 10 * MIB, resident=400 * MIB)
    assert fitting((light,), 100, resident=400 * MIB) == 45  # three quarters of 600 MiB, 10 MiB each


def test_costlier_items_are_expected_to_grow_as_the_known_ones_did() -> None:
    square = (trial(8, 100, MIB), trial(8, 200, 4 * MIB))
    assert fitting(square, 400) == round(0.75 * 1000 / 16 - 0.5)
    line = (trial(8, 100, MIB), trial(8, 200, 2 * MIB))
    assert fitting(line, 400) == int(0.75 * 1000 / (2 * 2**1.5))  # what is small so far may grow with the square


def test_no_more_items_than_failed_at_a_smaller_cost() -> None:
    trials = (trial(8, 100, MIB), trial(40, 100, MIB, verdict="oom"))
    assert fitting(trials, 100) == 39
    assert fitting(trials, 50) == 750 * 2  # at half the cost it says nothing


@given(
    growth=st.floats(1.0, 2.0),
    costs=st.lists(st.integers(20, 4000), min_size=2, max_size=5, unique=True),
    then=st.floats(1.0, 3.0),
    resident=st.integers(0, 500),
)
def test_the_extrapolated_size_stays_within_the_limit(
    growth: float, costs: list[int], then: float, resident: int
) -> None:
    def each(cost: float) -> float:
        return 1000 * cost**growth

    trials = tuple(trial(8, cost, each(cost), resident=resident * MIB) for cost in costs)
    item_cost = round(max(costs) * then)
    limit = resident * MIB + 64 * round(each(item_cost))
    guess = fitting(trials, item_cost, limit=limit, resident=resident * MIB)
    assert guess is not None
    assert resident * MIB + guess * each(item_cost) <= limit
    assert guess >= 47 / then  # and is not timid


def forecast(*points: tuple[int, int], item_cost: int = 100) -> Prior:
    return Prior(forecast=ForecastBytes(item_cost=item_cost, points=tuple((n, mib * MIB) for n, mib in points)))


LINE = forecast((2, 120), (8, 180), (64, 740))  # 100 MiB, and 10 each


def first(prior: Prior, limit: int, *, resident: int = 100) -> int:
    return prior.first_items(AvailableMemory(limit_bytes=limit * MIB, resident_bytes=resident * MIB, item_cost=100))


def test_a_forecast_gives_the_size_for_three_quarters_of_free_memory() -> None:
    assert LINE.fitting_items(AvailableMemory(limit_bytes=900 * MIB, resident_bytes=100 * MIB, item_cost=100)) == 60
    assert LINE.fitting_items(AvailableMemory(limit_bytes=100 * MIB, resident_bytes=100 * MIB, item_cost=100)) == 1


def test_what_has_failed_counts_for_more_than_a_forecast() -> None:
    prior = dataclasses.replace(LINE, trials=(trial(30, 100, MIB, verdict="oom"),))
    assert prior.fitting_items(AvailableMemory(limit_bytes=900 * MIB, resident_bytes=100 * MIB, item_cost=100)) == 29


def test_a_climb_starts_at_a_sixteenth_of_free_memory() -> None:
    assert first(LINE, 100 + 1600) == 10
    assert first(LINE, 100 + 160) == 2  # a sixteenth is one
    assert first(LINE, 100 + 20) == 1  # only one fits
    assert first(LINE, 100) == 1  # none does; the run will say so
    assert first(Prior(), 100) == 2


def test_a_forecast_that_does_not_grow_fits_all_or_nothing() -> None:
    flat = forecast((2, 70), (8, 70), (500, 70))
    assert first(flat, 16 * 70, resident=0) == 500
    assert first(flat, 60, resident=0) == 1


def test_quadratic_bytes_are_followed() -> None:
    square = forecast((2, 4), (8, 64), (100, 10_000))
    assert square.fitting_items(AvailableMemory(limit_bytes=1200 * MIB, resident_bytes=0, item_cost=100)) == 30


@given(
    constant=st.integers(0, 500),
    each=st.integers(1, 200),
    sizes=st.lists(st.integers(9, 5000), min_size=1, max_size=3),
    limit=st.integers(1, 10**6),
)
def test_no_first_batch_is_above_what_the_forecast_says_fits(
    constant: int, each: int, sizes: list[int], limit: int
) -> None:
    prior = forecast(*((size, constant + each * size) for size in (2, 8, *sorted(set(sizes)))))
    for size in (
        first(prior, limit, resident=0),
        prior.fitting_items(AvailableMemory(limit_bytes=limit * MIB, resident_bytes=0, item_cost=100)) or 0,
    ):
        assert size == 1 or constant + each * size <= limit


def test_bytes_are_reused_only_for_items_of_similar_cost() -> None:
    prior = Prior(trials=(trial(8, 100, MIB), trial(8, 200, MIB)))
    assert [prior.knows_bytes_near(cost) for cost in (10, 200, 300, 301)] == [True, True, True, False]
    assert not Prior(trials=(trial(8, 100, MIB, verdict="oom"),)).knows_bytes_near(100)


def test_a_size_limit_that_one_run_met_is_kept_away_from_by_the_next() -> None:
    met = Probe(batch_size=96, cost=75_744, verdict="size_limit", detail="a kernel's")
    assert Prior(trials=(met,)).cost_limit == 68_169
    assert Prior(trials=(Probe(batch_size=96, cost=75_744, verdict="oom"),)).cost_limit is None
    assert Prior().cost_limit is None


def tried(detail: str, *, items: int = 10, each: int = 600) -> Probe:
    return Probe(batch_size=items, cost=items * each, verdict="fits", detail=detail)


def test_sizes_are_compared_again_only_for_items_of_another_cost() -> None:
    compared = Prior(likely_size=6000, trials=(tried("climbing"), tried("comparing"), tried("settled")))
    assert compared.is_compared_near(600)
    assert compared.is_compared_near(800)
    assert not compared.is_compared_near(1000)
    assert not compared.is_compared_near(300)
    later = Prior(likely_size=6000, trials=(*compared.trials, tried("settled", each=800)))
    assert later.is_compared_near(600)  # a run that took the size over has compared nothing
    assert not later.is_compared_near(1000)


def test_a_comparison_that_the_run_was_too_short_for_does_not_count() -> None:
    assert not Prior(likely_size=6000, trials=(tried("comparing"),)).is_compared_near(600)
    assert not Prior(likely_size=6000, trials=(tried("settled"),)).is_compared_near(600)
