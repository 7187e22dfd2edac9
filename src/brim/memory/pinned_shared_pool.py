"""A pool of shared memory that loading processes write into and the device, or this process, reads from.

A tensor that a process sends arrives as a file in shared memory. For every tensor of every item that file is requested
from the process, opened, mapped, copied page by page into pinned memory, and thrown away. With pictures of some
megabytes this takes longer than the model, and it disturbs the thread that feeds the device. Here one large block of
memory is shared once, and pinned once where a device reads it. Every process has a part of it, writes an item's
tensors there, and sends only where they are.

    pool = PinnedSharedPool.acquire(item_bytes, workers=8)   # None where it does not pay, or cannot be allocated
    packed = pool.pack(prepared, worker=3)                   # in the process; unchanged where its part is full
    prepared = pool.unpack(packed)                           # here: tensors that lie in the pool
    pool.free([packed])                                      # the device may still be copying from it

Only the process that packs takes slots of its part, and only the process that unpacks frees them, so that neither
waits for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import torch

from brim.memory.transfer import replaced
from brim.monitor.host import free_shared_bytes

__all__ = ["Packed", "PinnedSharedPool", "tensor_bytes"]

MIN_POOLED_ITEM_BYTES = 1 << 10  # a tensor that torch sends costs about a millisecond here, however small it is
POOLED_ITEMS = 160  # at least: what is prepared ahead, and two batches
MIN_POOL_BYTES, MAX_POOL_BYTES = 1 << 26, 1 << 30
MAX_SHM_FRACTION = 0.25  # of what is free in /dev/shm
SLOTS_PER_PART = 4096
ALIGNED = 64  # bytes, for every kind of number


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the pool."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A value whose tensors lie in the pool."""

    slot: int
    value: Any


class PinnedSharedPool:
    """Shared memory with one part for each loading process."""

    _kept: torch.Tensor | None = None  # pinned by this process, kept from one loader to the next
    _in_use = False

    def __init__(self, memory: torch.Tensor, *, workers: int, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned
        self._memory = memory
        self._array = memory.numpy()
        self._part_bytes = memory.numel() // workers // ALIGNED * ALIGNED
        self._taken = torch.zeros(workers * SLOTS_PER_PART, dtype=torch.uint8).share_memory_()
        self._live: list[tuple[int, int, int]] = []  # in a process: start, stop and slot of what it has written
        self._leaving: list[tuple[Any, list[int]]] = []  # here: slots to be freed once the device has reached an event

    @classmethod
    def acquire(cls, item_bytes: int, *, workers: int, pin: bool = True, items: int = 0) -> Self | None:
        """A pool for `items` of this size, to be released with `release`; None: send them as torch does.

        Without `pin` only this process reads it, and every loader may have its own.
        """
        if item_bytes < (MIN_POOLED_ITEM_BYTES if pin else 1) or (pin and PinnedSharedPool._in_use):
            return None
        available = int(MAX_SHM_FRACTION * (free_shared_bytes() or 0))
        wanted = min(max(max(items, POOLED_ITEMS) * item_bytes, MIN_POOL_BYTES), MAX_POOL_BYTES, available)
        if wanted < MIN_POOL_BYTES:
            return None
        if not pin:
            shared = _shared(wanted)
            return None if shared is None else cls(shared, workers=workers, is_pinned=False)
        kept = PinnedSharedPool._kept
        if kept is None or kept.numel() < wanted // 2:
            PinnedSharedPool._kept = None
            if kept is not None:
                _unpin(kept)
            PinnedSharedPool._kept = kept = _pinned(wanted)
        if kept is None:
            return None
        PinnedSharedPool._in_use = True
        return cls(kept, workers=workers, is_pinned=True)

    def items_held(self, item_bytes: int) -> int:
        """How many items of this size there is memory for."""
        return self._memory.numel() // _aligned(max(item_bytes, 1))

    def release(self) -> None:
        """For the next loader: the processes have ended, and nothing that was unpacked is used again."""
        if self._memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        if self.is_pinned:
            PinnedSharedPool._in_use = False

    def pack(self, value: Any, *, worker: int) -> Any:
        """The value with its tensors in this process's part; unchanged where they do not fit."""
        sizes = [_aligned(tensor.nbytes) for tensor in _tensors(value)]
        place = self._find(sum(sizes), worker) if sum(sizes) else None
        if place is None:
            return value
        start, slot = place
        self._taken[slot] = 1

        def write(tensor: torch.Tensor) -> _Place:
            nonlocal start
            at = _Place(start, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
            self._memory[start : start + at.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            start += _aligned(tensor.nbytes)
            return at

        return Packed(slot, replaced(value, torch.Tensor, lambda one: write(one) if _is_plain(one) else one))

    def unpack(self, packed: Packed) -> Any:
        """The value again; its tensors lie in the pool.

        Each has a storage of its own: a meter that sees a tensor of the pool counts its bytes, not those of the pool.
        """

        def read(at: _Place) -> torch.Tensor:
            if not at.nbytes:
                return torch.empty(at.shape, dtype=at.dtype)
            count = at.nbytes // at.dtype.itemsize
            return torch.frombuffer(self._array, dtype=at.dtype, count=count, offset=at.start).reshape(at.shape)

        return replaced(packed.value, _Place, read)

    def free(self, packed: Iterable[Packed]) -> None:
        """Their slots may be taken again as soon as the device has finished what was queued so far."""
        mark = None
        if self._memory.is_pinned():
            mark = torch.cuda.Event()
            mark.record()
        self._leaving.append((mark, [one.slot for one in packed]))
        taken = self._taken.numpy()
        while self._leaving and (self._leaving[0][0] is None or self._leaving[0][0].query()):
            taken[self._leaving.pop(0)[1]] = 0

    def _find(self, nbytes: int, worker: int) -> tuple[int, int] | None:
        """The first gap in a process's part that is large enough, and a slot to free it by."""
        taken = self._taken.numpy()  # reading a number from a tensor takes 20 times as long
        self._live = [entry for entry in self._live if taken[entry[2]]]
        first = worker * self._part_bytes
        start = first
        place = len(self._live)
        for index, (taken_start, taken_stop, _) in enumerate(self._live):
            if taken_start - start >= nbytes:
                place = index
                break
            start = taken_stop
        used = {slot for _, _, slot in self._live}
        slots = range(worker * SLOTS_PER_PART, (worker + 1) * SLOTS_PER_PART)
        slot = next((slot for slot in slots if slot not in used), None)
        if slot is None or start + nbytes > first + self._part_bytes:
            return None
        self._live.insert(place, (start, start + nbytes, slot))
        return start, slot


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors of a value that could lie in a pool."""
    return sum(tensor.nbytes for tensor in _tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    replaced(value, torch.Tensor, found.append)
    return [tensor for tensor in found if _is_plain(tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it can be written as bytes: an ordinary tensor on the host."""
    ordinary = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return ordinary and not tensor.is_quantized and not tensor.requires_grad


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _shared(nbytes: int) -> torch.Tensor | None:
    memory: torch.Tensor | None = None
    with contextlib.suppress(RuntimeError, OSError):
        storage = torch.UntypedStorage._new_shared(nbytes)  # `share_memory_` would write all of it
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    return memory


def _pinned(nbytes: int) -> torch.Tensor | None:
    """Shared memory that is pinned for the device; None where that is not possible."""
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


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
