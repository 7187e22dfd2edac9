"""A pool that is shared with loading processes: what is written there is what comes out, and places are used again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.memory import pinned_shared_pool
from brim.memory.pinned_shared_pool import Packed, PinnedSharedPool, tensor_bytes
from brim.memory.storage_meter import StorageMeter
from brim.running.loader import Loader, LoaderSettings, NotPrepared

PART = 1 << 12


def pool_of(workers: int = 1, part_bytes: int = PART) -> PinnedSharedPool:
    return PinnedSharedPool(torch.zeros(workers * part_bytes, dtype=torch.uint8), workers=workers)


@pytest.fixture
def pinnable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose device can pin memory; here it only pretends to."""
    monkeypatch.setattr(pinned_shared_pool, "_registered", lambda memory: True)
    monkeypatch.setattr(pinned_shared_pool, "_unpin", lambda memory: None)
    monkeypatch.setattr(pinned_shared_pool, "MIN_POOLED_ITEM_BYTES", 1000)
    yield
    PinnedSharedPool._kept, PinnedSharedPool._in_use = None, False


def test_a_value_comes_out_as_it_went_in() -> None:
    value = {
        "pixels": torch.randn(3, 5, 2).to(torch.bfloat16),
        "ids": torch.arange(7).unsqueeze(0),
        "mask": torch.tensor([True, False]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "one": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "more": [torch.ones(2), ("name", 4, None)],
    }
    shared = pool_of()
    packed = shared.pack(value, worker=0)
    assert isinstance(packed, Packed)
    found = shared.unpack(packed)
    assert found.keys() == value.keys()
    for name in ("pixels", "ids", "mask", "turned", "one", "none"):
        assert torch.equal(found[name], value[name])
        assert found[name].dtype == value[name].dtype
    assert torch.equal(found["more"][0], torch.ones(2))
    assert found["more"][1] == ("name", 4, None)


def test_a_meter_counts_what_was_unpacked_and_not_the_pool() -> None:
    shared = pool_of()
    (one,) = shared.unpack(shared.pack([torch.ones(4)], worker=0))
    with StorageMeter() as meter:
        one.sum()
    assert meter.peak_bytes == one.nbytes + 4


def test_what_lies_in_the_pool_is_not_copied_again() -> None:
    shared = pool_of()
    packed = shared.pack([torch.ones(4)], worker=0)
    first, second = shared.unpack(packed)[0], shared.unpack(packed)[0]
    assert first.data_ptr() == second.data_ptr()


def test_a_full_part_sends_items_in_the_ordinary_way_until_a_place_is_free() -> None:
    shared = pool_of()
    third = torch.ones(PART // 3 // 64 * 64, dtype=torch.uint8)
    packed = [shared.pack(third, worker=0) for _ in range(3)]
    assert all(isinstance(one, Packed) for one in packed)
    assert shared.pack(third, worker=0) is third
    shared.free([packed[1]])
    again = shared.pack(third * 5, worker=0)
    assert isinstance(again, Packed)
    assert torch.equal(shared.unpack(again), third * 5)
    assert torch.equal(shared.unpack(packed[0]), third)
    assert torch.equal(shared.unpack(packed[2]), third)


def test_what_is_not_an_ordinary_tensor_stays_as_it_is() -> None:
    shared = pool_of()
    sparse = torch.eye(3).to_sparse()
    assert shared.pack({"text": "a", "ids": [1, 2]}, worker=0) == {"text": "a", "ids": [1, 2]}
    assert shared.pack(NotPrepared("why"), worker=0) == NotPrepared("why")
    packed = shared.pack([sparse, torch.ones(2)], worker=0)
    assert shared.unpack(packed)[0] is sparse
    assert tensor_bytes([sparse, torch.ones(2)]) == 8


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 1500), st.integers(0, 5)), max_size=40))
def test_nothing_is_overwritten_while_it_is_in_use(steps: list[tuple[int, int, int]]) -> None:
    """Two processes' parts; items of any size come and go in any order."""
    shared = pool_of(workers=2)
    held: list[tuple[Packed, torch.Tensor]] = []
    for number, (worker, size, leaving) in enumerate(steps):
        value = torch.full((size,), number % 251, dtype=torch.uint8)
        packed = shared.pack(value, worker=worker)
        if isinstance(packed, Packed):
            held.append((packed, value))
        if leaving < len(held):
            shared.free([held.pop(leaving)[0]])
        for one, written in held:
            assert torch.equal(shared.unpack(one), written)


def large(item: int) -> dict[str, Any]:
    if item == 3:
        raise ValueError("cannot read this one")
    return {"pixels": torch.full((500 * (1 + item % 3),), float(item)), "name": f"item {item}"}


def test_a_loader_returns_what_its_processes_wrote_to_the_pool(pinnable: None) -> None:
    order = list(range(40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to pin memory for on this machine
        with Loader(large, order, LoaderSettings(num_workers=2), pin=True) as loader:
            in_pool = 0
            for start in range(0, 40, 8):
                items = order[start : start + 8]
                for item, prepared in zip(items, loader.take(items), strict=True):
                    if item == 3:
                        assert prepared == NotPrepared("ValueError: cannot read this one")
                        continue
                    assert prepared["name"] == f"item {item}"
                    assert prepared["pixels"].tolist() == [float(item)] * (500 * (1 + item % 3))
                in_pool += len(loader._packed)
                loader.done(items)
            assert loader.item_bytes == 2000
            assert in_pool == 39
            assert not loader._packed
    assert not PinnedSharedPool._in_use


def test_two_loaders_at_once_do_not_share_it_and_the_next_one_has_it_again(pinnable: None) -> None:
    first = PinnedSharedPool.acquire(5000, workers=2)
    assert first is not None
    assert PinnedSharedPool.acquire(5000, workers=2) is None
    first.release()
    again = PinnedSharedPool.acquire(5000, workers=4)
    assert again is not None
    assert again._memory is first._memory
    again.release()


def test_small_items_a_small_shm_and_a_device_that_cannot_pin_do_without(
    pinnable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PinnedSharedPool.acquire(999, workers=2) is None
    monkeypatch.setattr(pinned_shared_pool, "_registered", lambda memory: False)
    assert PinnedSharedPool.acquire(5000, workers=2) is None
    assert not PinnedSharedPool._in_use
    monkeypatch.setattr(pinned_shared_pool, "_registered", lambda memory: True)
    monkeypatch.setattr(pinned_shared_pool, "free_shared_bytes", lambda: 1 << 20)
    assert PinnedSharedPool.acquire(5000, workers=2) is None
