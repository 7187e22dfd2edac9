"""Ghosts: tensors with a shape, a dtype, a device and a place in memory, and no data.

As torch's own fake tensors, but made for one purpose: autograd and models take them for ordinary tensors, an
operation on them costs microseconds, and each holds the `Block` that it would occupy, shared by all of its views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from brim.forecasting.ledger import Block

__all__ = ["READABLE", "Ghost", "make_ghost"]

READABLE = 4096  # elements up to which a step may read an array of values that nobody knows


class Ghost(torch.Tensor):
    """A tensor without data; operations on it are answered by the tracer that is active."""

    block: Block | None  # None: it takes no device memory
    value: torch.Tensor | None = None  # on the host, where it is known although the tensor is not on the host
    density: float | None = None  # of a mask: the share of its elements that is set, where that is known
    outside: Callable[..., Any] | None = None  # answers operations on ghosts outside of any trace

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch says to

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert Ghost.outside is not None
        return Ghost.outside(func, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's is untyped
        return f"Ghost({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """There is none: `block` is what a ghost is on."""
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


def make_ghost(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    block: Block | None,
    storage_offset: int = 0,
) -> Ghost:
    """A ghost on a block."""
    make: Any = torch.Tensor._make_wrapper_subclass
    ghost: Ghost = make(Ghost, size, strides=stride, storage_offset=storage_offset, dtype=dtype, device=device)
    ghost.block = block
    return ghost
