"""Nobody waits long for another, and every sample is dealt once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from brim.evaluation.shard_by_cost import shard_by_cost, shards_in_rounds

COSTS = st.lists(st.integers(1, 10_000), max_size=60)


@given(costs=COSTS, hands=st.integers(1, 9), skipped=st.sets(st.integers(0, 59)))
def test_every_item_goes_to_exactly_one_hand(costs: list[int], hands: int, skipped: set[int]) -> None:
    items = [item for item in range(len(costs)) if item not in skipped]
    dealt = shard_by_cost(items, costs, hands)
    assert len(dealt) == hands
    assert sorted(item for hand in dealt for item in hand) == items


@given(costs=COSTS, hands=st.integers(1, 9))
def test_hands_differ_by_at_most_the_dearest_item_and_start_with_their_own_dearest(
    costs: list[int], hands: int
) -> None:
    dealt = shard_by_cost(range(len(costs)), costs, hands)
    weights = [sum(costs[item] for item in hand) for hand in dealt]
    assert max(weights) - min(weights) <= max(costs, default=0)
    for hand in dealt:
        assert [costs[item] for item in hand] == sorted((costs[item] for item in hand), reverse=True)


@given(costs=COSTS, workers=st.integers(1, 9), smallest=st.integers(1, 20))
def test_rounds_hold_every_item_once_the_dear_ones_first(costs: list[int], workers: int, smallest: int) -> None:
    shares = shards_in_rounds(range(len(costs)), costs, workers, smallest=smallest)
    assert all(shares)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert len(shares) <= 4 * workers
    if shares:
        assert costs[shares[0][0]] == max(costs)


def test_the_last_round_is_small() -> None:
    shares = shards_in_rounds(range(800), [10] * 800, 4)
    assert [len(share) for share in shares] == [100] * 4 + [50] * 4 + [25] * 8


def test_no_round_is_made_for_shares_that_would_be_too_small_to_fill_batches() -> None:
    for smallest, expected in ((25, [100, 50, 25, 25]), (26, [100, 50, 50]), (51, [100, 100]), (101, [200])):
        shares = shards_in_rounds(range(400), [10] * 400, 2, smallest=smallest)
        assert [len(share) for share in shares] == [size for size in expected for _ in range(2)]
