"""Memory that loading processes write into, pinned for a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from brim.memory.host_copies import HostCopies
from brim.memory.pinned_shared_pool import Packed, PinnedSharedPool
from brim.memory.transfer import stacked
from brim.running.loader import Loader, LoaderSettings

pytestmark = pytest.mark.gpu

ITEM = 1 << 20  # numbers of two bytes


@pytest.fixture
def pool() -> Iterator[PinnedSharedPool]:
    acquired = PinnedSharedPool.acquire(2 * ITEM, workers=1)
    assert acquired is not None, "the driver does not pin shared memory"
    yield acquired
    acquired.release()


def prepare(item: int) -> dict[str, Any]:
    return {"pixels": torch.full((ITEM,), item % 100, dtype=torch.bfloat16), "ids": torch.tensor([item])}


def test_what_lies_in_the_pool_is_pinned_and_copied_without_waiting(pool: PinnedSharedPool) -> None:
    packed = pool.pack(prepare(7), worker=0)
    assert isinstance(packed, Packed)
    value = pool.unpack(packed)
    assert value["pixels"].is_pinned()
    assert value["ids"].is_pinned()
    assert bool((value["pixels"].to("cuda", non_blocking=True) == 7).all())


def test_a_place_is_not_taken_again_before_the_device_has_read_it(pool: PinnedSharedPool) -> None:
    packed = pool.pack(prepare(1), worker=0)
    torch.cuda._sleep(200_000_000)  # cycles: the copy waits behind it
    on_device = pool.unpack(packed)["pixels"].to("cuda", non_blocking=True)
    pool.free([packed])
    for number in range(2, 40):  # whatever place they get, it is not that one
        other = pool.pack(prepare(number), worker=0)
        if isinstance(other, Packed):
            pool.free([other])
    assert bool((on_device == 1).all())


def test_a_loader_gives_pinned_items_through_the_pool() -> None:
    order = list(range(300))
    in_pool = 0
    with Loader(prepare, order, LoaderSettings(num_workers=2), pin=True) as loader:
        for start in range(0, len(order), 20):
            items = order[start : start + 20]
            moved = [one["pixels"].to("cuda", non_blocking=True) for one in loader.take(items)]
            in_pool += len(loader._packed)
            loader.done(items)
            for item, pixels in zip(items, moved, strict=True):
                assert bool((pixels == item % 100).all())
    assert in_pool > 200


@pytest.mark.parametrize("width", [16, 1 << 16])  # put together on the host; copied one by one
def test_samples_of_any_size_are_stacked_on_the_device(width: int) -> None:
    parts = [torch.full((width,), float(item)) for item in range(9)]
    whole = stacked(parts, torch.device("cuda"))
    assert whole.device.type == "cuda"
    assert torch.equal(whole.cpu(), torch.stack(parts))


def test_a_copy_on_the_host_is_pinned_and_of_the_moment_it_was_taken() -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    copies = HostCopies()
    for number in range(3):
        torch.cuda._sleep(50_000_000)  # cycles: the copy waits behind it
        weight.fill_(number)
        copy = copies.take({"weight": weight, "step": torch.tensor(float(number))})
        weight.fill_(-1)
        assert copy is not None
        copy.wait()
        assert copy.tensors["weight"].is_pinned()
        assert bool((copy.tensors["weight"] == number).all())
        assert copy.tensors["step"] == number
