"""First guesses from runs under other knobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from brim.evaluation.hint import Hint
from brim.records import Probe

MIB = 2**20


def trial(items: int, item_cost: int, each: float, *, resident: int = 0, verdict: str = "fits") -> Probe:
    peak = round(resident + items * each)
    return Probe(batch_size=items, cost=items * item_cost, verdict=verdict, peak_allocated_bytes=peak)  # type: ignore[arg-type]


def fitting(trials: tuple[Probe, ...], item_cost: int, *, limit: int = 1000 * MIB, resident: int = 0) -> int | None:
    return Hint(trials=trials).fitting_items(limit, resident_bytes=resident, item_cost=item_cost)


def test_without_bytes_there_is_no_guess() -> None:
    assert fitting((), 100) is None
    unmeasured = Probe(batch_size=8, cost=800, verdict="fits")
    assert fitting((unmeasured,), 100) is None
    assert fitting((trial(8, 100, MIB, verdict="oom"),), 100) is None


def test_what_is_resident_is_no_items_bytes() -> None:
    light = trial(10, 100, 10 * MIB, resident=400 * MIB)
    assert fitting((light,), 100, resident=400 * MIB) == 45  # three quarters of 600 MiB, 10 MiB each


def test_dearer_items_are_expected_to_grow_as_the_known_ones_did() -> None:
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
def test_the_guess_stays_within_the_limit_wherever_growth_goes_on_as_it_was(
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
