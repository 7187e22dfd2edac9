"""Items in a pool: none is lost when taking them fails, and a pool that admits nothing gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from brim.memory.devices import MemoryReading
from brim.running.executor import ExecutionPolicy
from brim.running.pooled import PooledExecutor, PooledResult, PoolWork
from brim.running.results import ExecutionFigures
from brim.sizing.pool import PoolNeeds, PoolSize, PoolSizer

ITEMS = 9
LIMIT = 10_000


class Memory:
    def __init__(self, left: Sequence[int] = ()) -> None:
        self._left = list(left)  # what others leave, reading by reading; then all

    def left_by_others_bytes(self) -> int | None:
        return self._left.pop(0) if self._left else LIMIT

    @contextlib.contextmanager
    def metered(self, held: Iterable[Any] = ()) -> Iterator[MemoryReading]:
        yield MemoryReading()

    def release(self, *, thorough: bool = True) -> None:
        pass


class Pool:
    """Every item ends in the turn after it was admitted."""

    slot_bytes = 1
    computed = useful = 0

    def __init__(self, slots: int, admits: bool) -> None:
        self.slots, self._admits = slots, admits
        self._items: list[int] = []

    @property
    def active(self) -> int:
        return len(self._items)

    def admit(self, items: Sequence[int], prepared: Sequence[Any]) -> int:
        if not self._admits:
            return 0
        self._items += items
        return len(items)

    def advance(self) -> list[PooledResult]:
        ended, self._items = self._items, []
        return [PooledResult(item=item, result=item * 10, shared_with=len(ended)) for item in ended]

    def grow(self, slots: int) -> None:
        self.slots = slots

    def tensors(self) -> list[Any]:
        return []

    def release(self) -> None:
        pass


class Source:
    first_slots = 100

    def __init__(self, admits: bool = True) -> None:
        self.notes: list[str] = []
        self._admits = admits

    def needs(self, items: Sequence[int]) -> PoolNeeds:
        return PoolNeeds(slots=(16,) * len(items), row_bytes=1)

    def open(self, size: PoolSize) -> Pool:
        return Pool(size.slots, self._admits)


def executor(take: Any, *, admits: bool = True, left: Sequence[int] = ()) -> PooledExecutor:
    source = Source(admits)
    sizer = PoolSizer(source.needs(range(ITEMS)), limit_bytes=LIMIT, resident_bytes=0, most_rows=4, most_slots=None)
    work = PoolWork(source=source, take=take, costs=[1] * ITEMS, note=lambda line: None)
    return PooledExecutor(work, sizer=sizer, memory=Memory(left), figures=ExecutionFigures(), policy=ExecutionPolicy())


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_items_whose_preparation_runs_out_of_memory_wait_again(failing: int) -> None:
    calls: list[int] = []

    def take(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(calls) == failing:
            raise MemoryError
        return items

    pooled = executor(take)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert sorted(done) == list(range(ITEMS))
    assert pooled.left == []


def test_items_whose_preparation_fails_otherwise_are_left_to_batches() -> None:
    def take(items: list[int]) -> list[int]:
        raise ValueError("broken")

    pooled = executor(take)
    assert list(pooled.run(range(ITEMS))) == []
    assert sorted(pooled.left) == list(range(ITEMS))


@pytest.mark.timeout(20)
def test_a_pool_that_admits_nothing_leaves_all_to_batches() -> None:
    pooled = executor(lambda items: items, admits=False)
    assert list(pooled.run(range(ITEMS))) == []
    assert sorted(pooled.left) == list(range(ITEMS))


@pytest.mark.parametrize(("left", "failures"), [([LIMIT // 2, LIMIT // 2, LIMIT], 0), ([LIMIT], 1)])
def test_a_failure_counts_until_those_who_held_the_memory_have_given_it_back(left: list[int], failures: int) -> None:
    """With nobody else on the device it counts for good."""
    calls: list[int] = []

    def take(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(calls) == 2:
            raise MemoryError
        return items

    pooled = executor(take, left=left)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert sorted(done) == list(range(ITEMS))
    assert pooled.sizer.failures == failures
