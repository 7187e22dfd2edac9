from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.sizing.micro_batches import micro_batch_length
from brim.training.loop import Window, epoch_order, next_window

counts = st.integers(min_value=1, max_value=200)


@given(counts, st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(count))
    assert order == epoch_order(count, seed=seed, epoch=epoch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(counts, st.integers(1, 64), st.integers(1, 4), st.integers(1, 3))
def test_windows_cover_an_epoch_and_ranks_a_window(count: int, batch: int, ranks: int, smallest: int) -> None:
    order = epoch_order(count, seed=0, epoch=0)
    position, seen = 0, []
    while position < count:
        window = next_window(position, count, batch, smallest=smallest * ranks)
        shares = [window.share(order, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        seen += [item for share in shares for item in share]
        assert sum(map(len, shares)) == window.samples
        rest = count - window.stop
        assert rest == 0 or rest >= smallest * ranks  # nothing is left that could not be a window
        position = window.stop
    assert sorted(seen) == list(range(count))


def test_a_share_does_not_depend_on_where_windows_begin() -> None:
    order = epoch_order(40, seed=1, epoch=0)
    whole = Window(start=0, stop=40).share(order, rank=1, ranks=3)
    parts = [Window(start=a, stop=b).share(order, rank=1, ranks=3) for a, b in ((0, 7), (7, 8), (8, 31), (31, 40))]
    assert [item for part in parts for item in part] == whole


@given(counts, counts, st.integers(1, 3), st.booleans())
def test_micro_batches_make_up_the_share_and_none_is_too_short(count: int, cap: int, smallest: int, even: bool) -> None:
    lengths = []
    left = count
    while left:
        lengths.append(micro_batch_length(left, cap, smallest=smallest, even=even))
        assert lengths[-1] >= 1
        left -= lengths[-1]
    assert sum(lengths) == count
    if count >= smallest:
        assert min(lengths) >= smallest
    if cap >= 2 * smallest:
        assert max(lengths) <= max(cap, 2 * smallest - 1)
    if even and smallest == 1:
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == math.ceil(count / cap)


@pytest.mark.parametrize(("left", "expected"), [(65, 33), (64, 64), (128, 64), (3, 3)])
def test_an_even_cut_leaves_no_lone_sample(left: int, expected: int) -> None:
    assert micro_batch_length(left, 64) == expected


def test_costs_count_padded_to_the_dearest() -> None:
    assert micro_batch_length(10, 100, costliest=30, even=False) == 3
    assert micro_batch_length(10, 100, costliest=300, even=False) == 1  # past the cap, but it cannot be made smaller
