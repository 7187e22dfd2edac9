"""Tensors with a shape, a dtype, a device and a place in memory, but no data; and models built for their shapes alone.

As torch's own fake tensors, but made for one purpose: autograd and models take them for ordinary tensors, an
operation on them costs microseconds, and each holds the `Block` that it would occupy, shared by all of its views.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from brim.forecasting.ledger import Block
from brim.forecasting.torch_private import NO_TORCH_FUNCTION, TorchDispatchMode, make_wrapper_subclass
from brim.memory.collector import tracked_objects

__all__ = ["READABLE", "ShapeTensor", "forget_cached", "make_shape_tensor", "without_initialisation"]

READABLE = 4096  # elements up to which a step may read an array of unknown values


class ShapeTensor(torch.Tensor):
    """A tensor without data; operations on it are answered by the tracer that is active."""

    block: Block | None  # None: it takes no device memory
    value: torch.Tensor | None = None  # on the host, where it is known although the tensor is not on the host
    density: float | None = None  # of a mask: the share of its elements that is set, where that is known
    choices: int | None = None  # of places chosen by a model, such as the experts of a token: among how many
    outside: Callable[..., Any] | None = None  # answers operations on shape tensors outside of any trace

    __torch_function__ = NO_TORCH_FUNCTION  # as torch says to

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert ShapeTensor.outside is not None
        return ShapeTensor.outside(func, types, args, kwargs or {})

    def take_shares_of(self, other: ShapeTensor) -> None:
        """A view or a copy is as full as the whole, and a choice among as many."""
        if other.density is not None:
            self.density = other.density
        if other.choices is not None:
            self.choices = other.choices

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's is untyped
        return f"ShapeTensor({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __format__(self, format_spec: str) -> str:
        """A number as torch writes one, such as a loss to log: what `item` says."""
        return format(self.item(), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def untyped_storage(self) -> torch.UntypedStorage:
        """There is none: `block` is what a shape tensor is on."""
        raise NotImplementedError("a tensor of a trace has no storage")

    def numpy(self, *, force: bool = False) -> Any:
        """An array of what `item` says of every element; a large one is refused, as it would have to be made."""
        del force
        import numpy

        if self.numel() > READABLE:
            raise NotImplementedError(f"the step reads {self.numel()} values of an activation through numpy")
        one = self.flatten()[0].item() if self.numel() else 0
        return numpy.full(tuple(self.shape), one)

    def tolist(self) -> Any:
        """Nested lists of what `item` says of each element."""
        if self.value is not None:
            return self.value.tolist()
        if self.dim() == 0:
            return self.item()
        return [part.tolist() for part in self.unbind(0)]


def make_shape_tensor(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    block: Block | None,
    storage_offset: int = 0,
) -> ShapeTensor:
    """A shape tensor on a block."""
    shape_tensor: ShapeTensor = make_wrapper_subclass(
        ShapeTensor, size, strides=stride, storage_offset=storage_offset, dtype=dtype, device=device
    )
    shape_tensor.block = block
    return shape_tensor


_CACHE: Any = type(functools.cache(int))


def forget_cached() -> None:
    """Empty each `functools.lru_cache` that has kept a shape tensor: real steps to come would be given it."""
    for cache in tracked_objects():
        if type(cache) is _CACHE and _keeps_shape_tensors(cache):
            cache.cache_clear()


def _keeps_shape_tensors(cache: Any) -> bool:
    pending, seen = [cache], set()
    while pending:
        for value in gc.get_referents(pending.pop()):
            if type(value) is ShapeTensor:
                return True
            holds = type(value) in (tuple, list, dict) or type(value).__name__ == "_lru_list_elem"
            if holds and id(value) not in seen:
                seen.add(id(value))
                pending.append(value)
    return False


# From this size on the C library maps fresh pages, which read as zeros; smaller tensors may hold what was there
# before, and some ways to initialise draw again until every value is in range.
MAPPED_BYTES = 32 * 2**20


class _LeaveLargeTensors(TorchDispatchMode):
    """Skips random fills of large tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        aten = torch.ops.aten
        self._fills = {aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.random_.to}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._fills and args[0].untyped_storage().nbytes() >= MAPPED_BYTES:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave weights that are made inside the block as they come; nothing stays changed after it."""
    names = [
        name
        for name, value in vars(torch.nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(value)
    ]
    functions = vars(torch.nn.init)
    kept = {name: functions[name] for name in names}
    try:
        functions.update(dict.fromkeys(names, _left))
        with _LeaveLargeTensors():
            yield
    finally:
        functions.update(kept)


def _left(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
