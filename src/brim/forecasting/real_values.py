"""Real values beside the ghosts: small tensors that a step may read, and stand-ins for everything from outside.

A traced step must still be able to ask a mask how many ones it has or a grid of images how large it is. So small
tensors that do not come out of the model's arithmetic stay real, and only what meets an activation becomes a ghost.
Weights, buffers and data from outside the trace are never touched: below autograd a stand-in takes the place of each,
so that a gradient or an optimizer's state lands on the user's own parameter and no byte of it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from brim.forecasting.events import Category
from brim.forecasting.ghost import Ghost
from brim.forecasting.ledger import Block, Ledger
from brim.forecasting.shapes import TensorSpec

__all__ = ["FLOAT_LIMIT", "INTEGER_LIMIT", "RealValues", "is_unknown", "run_for_real", "small_enough"]

INTEGER_LIMIT = 2**22  # elements of an integer or boolean tensor up to which its values are kept
FLOAT_LIMIT = 4096  # the same for results in floating point
CONSTANT_LIMIT = 64  # and for floating-point tensors from outside: a schedule or a learning rate, not weights

_Held = tuple[weakref.ref[Any], torch.Tensor]


class RealValues:
    """Which tensors have values in a trace, and what stands in for those from outside."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # real storages made within the trace
        self._copies: dict[int, _Held] = {}  # by address of a storage from outside: a copy of all of it
        self._stand_ins: dict[int, _Held] = {}  # by identity of a tensor from outside
        self._adopted: list[tuple[Ghost, Block | None]] = []  # ghosts from outside, and what they were on

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor is on; one from outside is resident from now on."""
        if isinstance(tensor, Ghost):
            if tensor.block is not None and not tensor.block.is_in(self._ledger):
                return self.adopt(tensor, "inputs")
            return tensor.block
        storage = _storage_of(tensor)
        if storage is None:
            return None
        if storage._cdata in self._born:  # without a block, it is on the host
            return self._ledger.bound(storage)
        return self._ledger.bound(storage) or self.adopt(tensor, "inputs")

    def release(self) -> None:
        """Give the ghosts from outside back what they were on before."""
        for ghost, block in self._adopted:
            ghost.block = block
        self._adopted.clear()

    def adopt(self, tensor: torch.Tensor, label: Category) -> Block | None:
        """Count a tensor from outside as resident."""
        if isinstance(tensor, Ghost):
            if tensor.block is None or not tensor.block.is_in(self._ledger):  # made before the trace
                self._adopted.append((tensor, tensor.block))
                tensor.block = self._ledger.take_resident(tensor.numel() * tensor.element_size(), label)
            return tensor.block
        storage = _storage_of(tensor)
        if storage is None:
            return None
        block = self._ledger.bound(storage)
        if block is None:
            # What was there before is met in the first step; what comes up later was made outside of torch.
            late = self._ledger.steps > 1
            block = self._ledger.take(storage.nbytes(), "") if late else None
            block = block or self._ledger.take_resident(storage.nbytes(), label)
            if block is not None:
                self._ledger.bind(storage, block)
        return block

    def born(self, tensor: torch.Tensor, op: str, *, on_device: bool = True) -> None:
        """A real tensor was made within the trace: it may be changed in place."""
        storage = _storage_of(tensor)
        if storage is None or storage._cdata in self._born:
            return
        self._born[storage._cdata] = weakref.ref(storage, _popper(self._born, storage._cdata))
        if on_device and self._ledger.bound(storage) is None:
            block = self._ledger.take(storage.nbytes(), op)
            if block is not None:
                self._ledger.bind(storage, block)

    def valued(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor to compute with in place of this one, or None if its values are not kept."""
        if isinstance(tensor, Ghost):
            return tensor.value
        storage = _storage_of(tensor)
        if storage is None:
            return None
        if storage._cdata in self._born:
            return tensor
        held = self._stand_ins.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        if not _keeps_values(tensor, storage):
            return None
        copy = self._copy_of(tensor, storage)
        part: torch.Tensor = run_for_real(copy.as_strided, tensor.shape, tensor.stride(), tensor.storage_offset())
        self._stand_ins[id(tensor)] = (weakref.ref(tensor, _popper(self._stand_ins, id(tensor))), part)
        return part

    def _copy_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """One copy of a whole storage from outside, so that whatever shares memory there shares it here."""
        held = self._copies.get(storage._cdata)
        if held is not None and held[0]() is not None and held[1].dtype == tensor.dtype:
            return held[1]
        block = self.block_of(tensor)
        whole = run_for_real(lambda: torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))
        copy: torch.Tensor = run_for_real(lambda: whole.to("cpu", copy=True))
        if block is not None:
            self._ledger.bind(copy.untyped_storage(), block)
        self.born(copy, "", on_device=False)
        self._copies[storage._cdata] = (weakref.ref(storage, _popper(self._copies, storage._cdata)), copy)
        return copy


def is_unknown(tensor: torch.Tensor) -> bool:
    """Whether only a real run would know the values of a tensor."""
    return isinstance(tensor, Ghost) and tensor.value is None


def small_enough(spec: Any) -> bool:
    """Whether results may be computed for real beside the trace."""
    if isinstance(spec, TensorSpec):
        elements = 1
        for size in spec.size:
            elements *= size
        return elements <= (FLOAT_LIMIT if _is_float(spec.dtype) else INTEGER_LIMIT)
    return all(small_enough(part) for part in spec) if isinstance(spec, list) else True


def run_for_real(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call past every dispatch mode, outside of inference mode, without gradients."""
    guard = torch._C._DisableTorchDispatch()
    try:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    finally:
        del guard


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _keeps_values(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    if tensor.device.type not in ("cpu", "cuda") or isinstance(tensor, torch.nn.Parameter):
        return False
    elements = storage.nbytes() // tensor.element_size()
    return elements <= (CONSTANT_LIMIT if _is_float(tensor.dtype) else INTEGER_LIMIT)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _popper(held: dict[int, Any], key: int) -> Callable[[object], None]:
    def pop(_: object) -> None:
        held.pop(key, None)

    return pop
