"""Room that loading processes write into, and the device or this process reads from.

A tensor that a process sends arrives as a file in shared memory: asked for from that process, opened, mapped, copied
page by page into memory that is locked for the device, and thrown away, for every tensor of every item. With pictures
of some megabytes that takes longer than the model does, and it disturbs the thread that feeds the device. Here one
large stretch of memory is shared once, and locked once where a device reads it. Every process has a part of it, writes
an item's tensors there, and sends only where they are.

    room = SharedRoom.lend(item_bytes, workers=8)    # None where it is not worth it, or cannot be had
    packed = room.pack(prepared, worker=3)           # in the process; as it was where there is no room for it
    prepared = room.unpack(packed)                   # here: tensors that lie in the room
    room.free([packed])                              # what the device was told to copy, it may still be copying

The one who packs is the only one who takes places of his part, and the one who unpacks the only one who frees them, so
that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import torch

from brim.memory.nested import replaced
from brim.monitor.host import free_shared_bytes

__all__ = ["Packed", "SharedRoom", "tensor_bytes"]

WORTHWHILE_BYTES = 1 << 18  # of an item: smaller ones cost little in the ordinary way
ITEMS = 160  # to have room for: what is prepared ahead, and two batches
LEAST_BYTES, MOST_BYTES = 1 << 26, 1 << 30
SHARE_OF_SHM = 0.25  # of what is free there
MOST_PLACES = 512  # taken at a time in one part
ALIGNED = 64  # bytes, for every kind of number


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the room."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A value whose tensors lie in the room."""

    slot: int
    value: Any


class SharedRoom:
    """Shared memory in as many parts as there are processes."""

    _kept: torch.Tensor | None = None  # locked by this process, from one loader to the next
    _is_lent = False

    def __init__(self, memory: torch.Tensor, *, workers: int, is_locked: bool = False) -> None:
        self.is_locked = is_locked
        self._memory = memory
        self._part_bytes = memory.numel() // workers // ALIGNED * ALIGNED
        self._taken = torch.zeros(workers * MOST_PLACES, dtype=torch.uint8).share_memory_()
        self._live: list[tuple[int, int, int]] = []  # in a process: start, stop and slot of what it has written
        self._leaving: list[tuple[Any, list[int]]] = []  # here: slots to be freed once the device has come so far

    @classmethod
    def lend(cls, item_bytes: int, *, workers: int, lock: bool = True) -> Self | None:
        """Room for items of this size; give it back with `give_back`. None: send them in the ordinary way.

        Without `lock` it is for this process alone to read, and every loader may have its own.
        """
        if item_bytes < (WORTHWHILE_BYTES if lock else 1) or (lock and SharedRoom._is_lent):
            return None
        room = int(SHARE_OF_SHM * (free_shared_bytes() or 0))
        wanted = min(max(ITEMS * item_bytes, LEAST_BYTES), MOST_BYTES, room)
        if wanted < LEAST_BYTES:
            return None
        if not lock:
            shared = _shared(wanted)
            return None if shared is None else cls(shared, workers=workers, is_locked=False)
        kept = SharedRoom._kept
        if kept is None or kept.numel() < wanted // 2:
            SharedRoom._kept = None
            if kept is not None:
                _unlock(kept)
            SharedRoom._kept = kept = _locked(wanted)
        if kept is None:
            return None
        SharedRoom._is_lent = True
        return cls(kept, workers=workers, is_locked=True)

    def give_back(self) -> None:
        """The next loader may have it: the processes have ended, and nothing that was unpacked is used again."""
        if self._memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        if self.is_locked:
            SharedRoom._is_lent = False

    def pack(self, value: Any, *, worker: int) -> Any:
        """The value with its tensors in this process's part; as it is, where there is no room for them."""
        sizes = [_aligned(tensor.nbytes) for tensor in _tensors(value)]
        place = self._find(sum(sizes), worker) if sum(sizes) else None
        if place is None:
            return value
        start, slot = place
        self._taken[slot] = 1

        def write(tensor: torch.Tensor) -> _Place:
            nonlocal start
            at = _Place(start, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
            self._bytes_at(at).copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            start += _aligned(tensor.nbytes)
            return at

        return Packed(slot, replaced(value, torch.Tensor, lambda one: write(one) if _lies_flat(one) else one))

    def unpack(self, packed: Packed) -> Any:
        """The value again; its tensors are views of the room."""

        def read(at: _Place) -> torch.Tensor:
            return self._bytes_at(at).view(at.dtype).reshape(at.shape)

        return replaced(packed.value, _Place, read)

    def free(self, packed: Iterable[Packed]) -> None:
        """Their places may be taken again, as soon as the device has done what it was given so far."""
        mark = None
        if self._memory.is_pinned():
            mark = torch.cuda.Event()
            mark.record()
        self._leaving.append((mark, [one.slot for one in packed]))
        while self._leaving and (self._leaving[0][0] is None or self._leaving[0][0].query()):
            for slot in self._leaving.pop(0)[1]:
                self._taken[slot] = 0

    def _bytes_at(self, at: _Place) -> torch.Tensor:
        return self._memory[at.start : at.start + at.nbytes]

    def _find(self, nbytes: int, worker: int) -> tuple[int, int] | None:
        """The first gap in a process's part that is large enough, and a slot to free it by."""
        self._live = [entry for entry in self._live if self._taken[entry[2]]]
        first = worker * self._part_bytes
        start = first
        place = len(self._live)
        for index, (taken_start, taken_stop, _) in enumerate(self._live):
            if taken_start - start >= nbytes:
                place = index
                break
            start = taken_stop
        used = {slot for _, _, slot in self._live}
        slots = range(worker * MOST_PLACES, (worker + 1) * MOST_PLACES)
        slot = next((slot for slot in slots if slot not in used), None)
        if slot is None or start + nbytes > first + self._part_bytes:
            return None
        self._live.insert(place, (start, start + nbytes, slot))
        return start, slot


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors of a value that could lie in a room."""
    return sum(tensor.nbytes for tensor in _tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    replaced(value, torch.Tensor, found.append)
    return [tensor for tensor in found if _lies_flat(tensor)]


def _lies_flat(tensor: torch.Tensor) -> bool:
    """Whether it can be written as bytes: an ordinary tensor on the host."""
    ordinary = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return ordinary and not tensor.is_quantized and not tensor.requires_grad


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _shared(nbytes: int) -> torch.Tensor | None:
    memory: torch.Tensor | None = None
    with contextlib.suppress(RuntimeError, OSError):
        memory = torch.empty(nbytes, dtype=torch.uint8).share_memory_()
    return memory


def _locked(nbytes: int) -> torch.Tensor | None:
    """Shared memory that is locked for the device; None where that is not to be had."""
    memory = _shared(nbytes)
    with contextlib.suppress(RuntimeError, OSError):
        if memory is not None and _registered(memory):
            return memory
    return None


def _registered(memory: torch.Tensor) -> bool:
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # the error waits for whoever launches a kernel next: let it be this one
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    return False


def _unlock(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
