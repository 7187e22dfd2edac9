from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.training.fast_path.task import EpochPlan, epoch_orders

plans = st.builds(
    EpochPlan,
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple),
    batch_size=st.integers(1, 40),
    matched=st.booleans(),
)


@given(plans, st.integers(0, 100), st.integers(0, 5))
def test_an_epoch_reads_the_longest_stream_once(plan: EpochPlan, seed: int, epoch: int) -> None:
    orders = epoch_orders(plan, seed=seed, epoch=epoch)
    start = 0
    for order, length in zip(orders, plan.lengths, strict=True):
        taken = Counter((order - start).tolist())
        assert set(taken) <= set(range(length))
        times = [taken[row] for row in range(length)]
        assert max(times) - min(times) <= 1
        if length == max(plan.lengths):
            assert times == [1] * length
        start += length


@given(plans)
def test_no_step_is_empty_and_none_holds_more_rows_of_a_stream_than_it_has(plan: EpochPlan) -> None:
    for step in range(plan.steps):
        for count, length in zip(plan.counts(step), plan.lengths, strict=True):
            assert 1 <= count <= plan.batch_size
            assert plan.matched or count <= length


def test_two_thousand_molecules_and_a_batch_of_8192_are_one_step() -> None:
    plan = EpochPlan(lengths=(2000, 1500), batch_size=8192)
    assert (plan.size, plan.steps, plan.full, plan.last) == (2000, 1, (2000, 1500), (2000, 1500))


def test_the_last_step_takes_what_is_left() -> None:
    plan = EpochPlan(lengths=(10, 3), batch_size=4)
    assert [plan.counts(step) for step in range(plan.steps)] == [(4, 3), (4, 3), (2, 2)]
    assert EpochPlan(lengths=(10, 3), batch_size=4, matched=True).spans == (10, 10)


def test_orders_differ_by_seed_and_epoch_and_by_nothing_else() -> None:
    plan = EpochPlan(lengths=(50,), batch_size=8)
    (one,) = epoch_orders(plan, seed=1, epoch=2)
    torch.manual_seed(99)
    assert torch.equal(one, epoch_orders(plan, seed=1, epoch=2)[0])
    assert not torch.equal(one, epoch_orders(plan, seed=1, epoch=3)[0])
    assert not torch.equal(one, epoch_orders(plan, seed=2, epoch=2)[0])


@pytest.mark.parametrize(("lengths", "batch_size"), [((0,), 4), ((), 4), ((3, 0), 4), ((3,), 0)])
def test_nothing_to_train_on_is_refused(lengths: tuple[int, ...], batch_size: int) -> None:
    with pytest.raises(RequestError):
        EpochPlan(lengths=lengths, batch_size=batch_size)
