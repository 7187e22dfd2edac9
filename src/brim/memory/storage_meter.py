"""A meter for eager CPU code: follows storages through a dispatch mode and can raise out of memory.

What it bounds: the outputs of eager operations in the calling thread, and every tensor those operations
touch. What it cannot see: scratch inside kernels (a convolution without mkldnn may use ten times what is
seen), other threads, storage `resize_`, and compiled code, which `refuse_compiled` turns away. It costs
tens of microseconds per operation, so timings are taken with it off. Real host memory is guarded by child
processes, not by this.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.errors import RequestError

__all__ = ["StorageMeter", "refuse_compiled"]


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of live storages, like CUDA's `memory_allocated`, for CPU tensors.

        with StorageMeter(limit_bytes=64 * 2**20) as meter:
            step(batch)
        meter.peak_bytes

    A storage is counted when an operation first returns or reads it, and until the last tensor on it is
    gone. With a limit, the operation that would pass it raises `torch.OutOfMemoryError`.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.refusal: str | None = None  # the error of the last operation, if it was refused
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._on = False

    def __enter__(self) -> Self:
        with _Uninterrupted():
            super().__enter__()  # type: ignore[no-untyped-call]
            self._on = True
        return self

    def __exit__(self, *error: object) -> None:
        self.off()

    def off(self) -> None:
        """Meter no longer, if it still does: Ctrl-C may have come between its start and the block that ends it."""
        with _Uninterrupted():
            if self._on:
                self._on = False
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already: weights, gradients, optimizer state."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.refusal = None
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, new=True)
        return result

    def _count(self, tensor: torch.Tensor, *, new: bool = False) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        if new and self.limit_bytes is not None and self.current_bytes + size > self.limit_bytes:
            self.refusal = (
                f"memory limit of {self.limit_bytes} bytes: {self.current_bytes} in use, "
                f"tried to allocate {size} bytes more"
            )
            raise torch.OutOfMemoryError(self.refusal)
        self._live[key] = (weakref.ref(storage, self._forget(key)), size)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: int) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            meter = owner()
            if meter is not None and key in meter._live:
                meter.current_bytes -= meter._live.pop(key)[1]

        return forget


class _Uninterrupted:
    """Ctrl-C inside counts at its end: torch puts a mode on its stack, and takes it off, in several steps."""

    def __enter__(self) -> None:
        self._pressed_in: FrameType | None = None
        in_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGINT) if in_main else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._press)

    def __exit__(self, *error: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._pressed_in is not None:
                self._handler(signal.SIGINT, self._pressed_in)

    def _press(self, number: int, frame: FrameType | None) -> None:
        del number
        self._pressed_in = frame


def refuse_compiled(modules: Iterable[nn.Module], *functions: Any) -> None:
    """Raise a `RequestError` for compiled code: it runs past the meter, so a limit would not hold."""
    optimized = getattr(torch._dynamo.eval_frame, "OptimizedModule", ()) if "torch._dynamo" in _loaded() else ()
    for module in modules:
        if optimized and any(isinstance(part, optimized) for part in module.modules()):
            raise RequestError(_COMPILED.format(what=type(module).__name__))
    for function in functions:
        if hasattr(function, "_torchdynamo_orig_callable"):
            raise RequestError(_COMPILED.format(what=getattr(function, "__name__", "step")))


_COMPILED = (
    "{what} is compiled with torch.compile: on the CPU brim measures eager operations and cannot see inside compiled "
    "code; find the batch size on the uncompiled module, or on CUDA"
)


def _loaded() -> Any:
    import sys

    return sys.modules
