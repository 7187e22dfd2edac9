"""Memory that loading processes write into, locked for a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from brim.memory.shared_room import Packed, SharedRoom
from brim.running.loader import Loader, LoaderSettings

pytestmark = pytest.mark.gpu

ITEM = 1 << 20  # numbers of two bytes


@pytest.fixture
def room() -> Iterator[SharedRoom]:
    lent = SharedRoom.lend(2 * ITEM, workers=1)
    assert lent is not None, "the driver does not lock shared memory"
    yield lent
    lent.give_back()


def prepare(item: int) -> dict[str, Any]:
    return {"pixels": torch.full((ITEM,), item % 100, dtype=torch.bfloat16), "ids": torch.tensor([item])}


def test_what_lies_in_the_room_is_pinned_and_copied_without_waiting(room: SharedRoom) -> None:
    packed = room.pack(prepare(7), worker=0)
    assert isinstance(packed, Packed)
    value = room.unpack(packed)
    assert value["pixels"].is_pinned()
    assert value["ids"].is_pinned()
    assert bool((value["pixels"].to("cuda", non_blocking=True) == 7).all())


def test_a_place_is_not_taken_again_before_the_device_has_read_it(room: SharedRoom) -> None:
    packed = room.pack(prepare(1), worker=0)
    torch.cuda._sleep(200_000_000)  # cycles: the copy waits behind it
    on_device = room.unpack(packed)["pixels"].to("cuda", non_blocking=True)
    room.free([packed])
    for number in range(2, 40):  # whatever place they get, it is not that one
        other = room.pack(prepare(number), worker=0)
        if isinstance(other, Packed):
            room.free([other])
    assert bool((on_device == 1).all())


def test_a_loader_gives_pinned_items_through_the_room() -> None:
    order = list(range(300))
    in_room = 0
    with Loader(prepare, order, LoaderSettings(num_workers=2), pin=True) as loader:
        for start in range(0, len(order), 20):
            items = order[start : start + 20]
            moved = [one["pixels"].to("cuda", non_blocking=True) for one in loader.take(items)]
            in_room += len(loader._packed)
            loader.done(items)
            for item, pixels in zip(items, moved, strict=True):
                assert bool((pixels == item % 100).all())
    assert in_room > 200
