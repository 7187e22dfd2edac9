"""Shards are balanced by cost, and every sample is in exactly one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from brim.evaluation.shard_by_cost import shard_by_cost, shards_in_rounds

COSTS = st.lists(st.integers(1, 10_000), max_size=60)


@given(costs=COSTS, count=st.integers(1, 9), skipped=st.sets(st.integers(0, 59)))
def test_every_item_is_in_exactly_one_shard(costs: list[int], count: int, skipped: set[int]) -> None:
    items = [item for item in range(len(costs)) if item not in skipped]
    shards = shard_by_cost(items, costs, count)
    assert len(shards) == count
    assert sorted(item for shard in shards for item in shard) == items


@given(costs=COSTS, count=st.integers(1, 9))
def test_shards_are_balanced_to_one_item_and_ordered_costliest_first(costs: list[int], count: int) -> None:
    shards = shard_by_cost(range(len(costs)), costs, count)
    totals = [sum(costs[item] for item in shard) for shard in shards]
    assert max(totals) - min(totals) <= max(costs, default=0)
    for shard in shards:
        assert [costs[item] for item in shard] == sorted((costs[item] for item in shard), reverse=True)


@given(costs=COSTS, workers=st.integers(1, 9), smallest=st.integers(1, 20))
def test_rounds_hold_every_item_once_costly_ones_first(costs: list[int], workers: int, smallest: int) -> None:
    shards = shards_in_rounds(range(len(costs)), costs, workers, smallest=smallest)
    assert all(shards)
    assert sorted(item for shard in shards for item in shard) == list(range(len(costs)))
    assert len(shards) <= 4 * workers
    if shards:
        assert costs[shards[0][0]] == max(costs)


def test_the_last_round_is_small() -> None:
    shards = shards_in_rounds(range(800), [10] * 800, 4)
    assert [len(shard) for shard in shards] == [100] * 4 + [50] * 4 + [25] * 8


def test_shards_too_small_to_fill_batches_are_not_made() -> None:
    for smallest, expected in ((25, [100, 50, 25, 25]), (26, [100, 50, 50]), (51, [100, 100]), (101, [200])):
        shards = shards_in_rounds(range(400), [10] * 400, 2, smallest=smallest)
        assert [len(shard) for shard in shards] == [size for size in expected for _ in range(2)]
