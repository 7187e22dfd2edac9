"""Items in a pool: none is lost when taking them fails, and a pool that admits nothing gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from brim.memory.devices import MemoryReading
from brim.running.executor import ExecutionPolicy
from brim.running.loader import NotPrepared
from brim.running.pooled import PooledExecutor, PooledResult, PoolWork
from brim.running.results import ExecutionFigures
from brim.sizing.pool import PoolNeeds, PoolSize, PoolSizer

ITEMS = 9
LIMIT = 10_000


class Memory:
    def __init__(self, left: Sequence[int] = (), *, peaks: Sequence[int] = ()) -> None:
        self._left = list(left)  # what others leave, reading by reading; then all
        self._peaks = iter(peaks)

    def left_by_others_bytes(self) -> int | None:
        return self._left.pop(0) if self._left else LIMIT

    @contextlib.contextmanager
    def metered(self, held: Iterable[Any] = ()) -> Iterator[MemoryReading]:
        yield MemoryReading(peak_allocated_bytes=next(self._peaks, 0))

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

    def __init__(self, admits: bool = True, *, portion: int = 1000, slots: int = 16) -> None:
        self.portion = portion
        self.notes: list[str] = []
        self._admits, self._slots = admits, slots

    def needs(self, items: Sequence[int]) -> PoolNeeds:
        return PoolNeeds(slots=(self._slots,) * len(items), row_bytes=1)

    def open(self, size: PoolSize) -> Pool:
        return Pool(size.slots, self._admits)


def executor(
    take: Any, *, admits: bool = True, limit_bytes: int = LIMIT, portion: int = 1000, slots: int = 16,
    left: Sequence[int] = (), peaks: Sequence[int] = (), **options: Any,
) -> PooledExecutor:  # fmt: skip
    source = Source(admits, portion=portion, slots=slots)
    sizer = PoolSizer(
        source.needs(range(ITEMS)), limit_bytes=limit_bytes, resident_bytes=0, most_rows=4, most_slots=None
    )
    work = PoolWork(source=source, take=take, costs=[1] * ITEMS, note=lambda line: None, **options)
    memory = Memory(left, peaks=peaks)
    return PooledExecutor(work, sizer=sizer, memory=memory, figures=ExecutionFigures(), policy=ExecutionPolicy())


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


@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError()])
def test_an_item_that_cannot_be_prepared_is_not_lost_when_the_rest_of_its_turn_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def take(items: list[int]) -> list[Any]:
        calls.append(len(items))
        return [NotPrepared(message="broken") if item == 1 else item for item in items]

    def admit(pool: Pool, items: Sequence[int], prepared: Sequence[Any]) -> int:
        if len(calls) == 1:
            raise error
        pool._items += items
        return len(items)

    monkeypatch.setattr(Pool, "admit", admit)
    pooled = executor(take)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert 1 in done
    assert sorted([*done, *pooled.left]) == list(range(ITEMS))


def test_what_is_in_a_pool_that_turns_out_too_large_is_left_to_batches() -> None:
    """The first items show that the costliest would not fit: then they are inside already."""
    pooled = executor(lambda items: items, limit_bytes=20)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert pooled.sizer.hopeless
    assert sorted([*done, *pooled.left]) == list(range(ITEMS))


def test_items_are_taken_a_portion_at_a_time_and_set_aside_once_admitted() -> None:
    taken: list[list[int]] = []
    aside: list[int] = []

    def take(items: list[int]) -> list[int]:
        taken.append(items)
        return items

    pooled = executor(take, portion=2, set_aside=aside.extend)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert sorted(done) == list(range(ITEMS))
    assert aside == list(range(2, ITEMS)), "the first may be read again, in smaller chunks"
    assert max(map(len, taken)) == 2
    assert max(pooled._figures.batch_counts) > 2, "the pool is filled all the same"


def test_an_item_that_costs_more_than_a_portion_is_taken_alone() -> None:
    taken: list[int] = []

    def take(items: list[int]) -> list[int]:
        taken.append(len(items))
        return items

    done = [one.item for some in executor(take, portion=0).run(range(ITEMS)) for one in some]
    assert sorted(done) == list(range(ITEMS))
    assert set(taken) == {1}


def test_a_pool_whose_chunks_take_most_of_the_memory_starts_anew_with_smaller_ones() -> None:
    pooled = executor(lambda items: items, limit_bytes=1000, peaks=[950, 950, 300], slots=200)
    done = [one.item for some in pooled.run(range(ITEMS)) for one in some]
    assert sorted(done) == list(range(ITEMS))
    assert pooled.sizer.halvings == 2
    assert pooled.sizer.failures == 0
    assert pooled.trials == []


@pytest.mark.parametrize(("ahead", "largest"), [(True, 2), (False, 4)])
def test_steps_are_made_while_items_are_being_prepared(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, largest: int
) -> None:
    """Only where others prepare them: what this process prepares takes its time before a step or after."""
    monkeypatch.setattr("brim.running.pooled.NOT_READY_SECONDS", -1.0)
    pooled = executor(lambda items: items, portion=2, ahead=lambda: ahead)
    assert len([one for some in pooled.run(range(ITEMS)) for one in some]) == ITEMS
    assert max(pooled._figures.batch_counts[2:]) == largest, "beside the first, which show the size"


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
