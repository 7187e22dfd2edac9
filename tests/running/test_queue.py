"""The order of work and the shape of batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from brim.running.executor import WorkQueue, padded_cost


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 500))
def test_every_item_is_taken_once_dearest_first_within_the_cap(costs: list[int], cap: int) -> None:
    queue = WorkQueue(costs, range(len(costs)))
    taken: list[int] = []
    while queue:
        batch = queue.take(cap)
        assert padded_cost(costs[item] for item in batch) <= cap or len(batch) == 1
        taken += batch
    assert sorted(taken) == list(range(len(costs)))
    assert [costs[item] for item in taken] == sorted(costs, reverse=True)


def test_equal_costs_keep_the_callers_order() -> None:
    assert WorkQueue([5] * 4, [2, 0, 3, 1]).take(100) == [2, 0, 3, 1]


def test_a_batch_put_back_comes_next_in_the_same_order() -> None:
    queue = WorkQueue([1] * 6, range(6))
    queue.put_back(queue.take(4))
    assert queue.take(2) == [0, 1]
    assert queue.take(9) == [2, 3, 4, 5]


def test_halves_of_a_spoilt_batch_run_before_the_rest_and_as_they_are() -> None:
    queue = WorkQueue([1] * 6, range(6))
    queue.split(queue.take(4))
    assert queue.take(1) == [0, 1]
    assert queue.take(1) == [2, 3]
    assert queue.take(9) == [4, 5]


def test_padded_cost_is_the_number_times_the_dearest() -> None:
    assert padded_cost([3, 7, 5]) == 21
    assert padded_cost([]) == 0


def test_the_cheapest_item_can_be_brought_forward() -> None:
    queue = WorkQueue([5, 9, 1, 7], range(4))
    queue.bring_cheapest()
    assert queue.take(100) == [2]
    assert queue.take(100) == [1, 3, 0]
