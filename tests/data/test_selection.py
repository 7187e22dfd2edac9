from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.data.base import Sample
from brim.data.selection import stratified
from brim.errors import RequestError

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

groups = st.lists(st.sampled_from(["red", "green", "blue", None]), min_size=1, max_size=120)


def samples_in(names: list[str | None]) -> list[Sample]:
    return [Sample(id=str(place), group=name) for place, name in enumerate(names)]


@given(groups, st.integers(1, 130))
def test_the_selection_has_the_size_order_and_proportions(names: list[str | None], count: int) -> None:
    samples = samples_in(names)
    chosen = stratified(samples, count)
    places = [int(each.id) for each in chosen]
    assert len(chosen) == min(count, len(samples))
    assert places == sorted(set(places))
    assert all(samples[place] is each for place, each in zip(places, chosen, strict=True))
    taken, there = Counter(each.group for each in chosen), Counter(names)
    for name, number in there.items():
        assert abs(taken[name] - number * len(chosen) / len(samples)) < 1
    assert stratified(samples, count) == chosen


@given(st.integers(1, 300), st.integers(1, 300))
def test_without_groups_the_gaps_differ_by_one_at_most(length: int, count: int) -> None:
    places = [int(each.id) for each in stratified(samples_in([None] * length), count)]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert abs(places[0] - (length - 1 - places[-1])) <= 1  # as far from the start as from the end


def test_each_group_is_spread_over_its_length() -> None:
    chosen = stratified(samples_in(["a"] * 30 + ["b"] * 10), 4)
    assert [each.id for each in chosen] == ["5", "15", "25", "35"]


def test_the_rest_goes_to_the_largest_remainders() -> None:
    chosen = stratified(samples_in(["a"] * 6 + ["b"] * 3 + ["c"]), 3)
    assert Counter(each.group for each in chosen) == {"a": 2, "b": 1}


@pytest.mark.parametrize("count", [0, -3])
def test_a_limit_below_one_is_refused(count: int) -> None:
    with pytest.raises(RequestError, match=f"--limit {count}: it must be at least 1"):
        stratified(samples_in(["a"]), count)
