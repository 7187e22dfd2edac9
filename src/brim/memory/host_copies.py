"""Copies of tensors in host memory that is kept from one copy to the next, pinned where a CUDA device is the source.

The device copies behind the work that was queued on its stream, and what is queued later waits for the copies alone;
the host waits for neither. The next copy overwrites the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from brim.monitor.host import available_host_bytes

__all__ = ["HostCopies", "HostCopy"]

MAX_HOST_FRACTION = 0.4  # of the host memory that is free: whoever writes a copy to a file may need as much again


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """Tensors in host memory, once `wait` has returned."""

    tensors: dict[str, torch.Tensor]
    ready: Any = None  # a CUDA event

    def wait(self) -> None:
        """Until the device has copied all of them; may be called from any thread."""
        if self.ready is not None:
            self.ready.synchronize()


class HostCopies:
    """The memory of one copy at a time."""

    def __init__(self) -> None:
        self._layout: tuple[Any, ...] = ()
        self._places: dict[str, torch.Tensor] = {}  # in host memory, as the tensors will be

    def take(self, tensors: Mapping[str, torch.Tensor]) -> HostCopy | None:
        """Copy them; None where there is too little free memory on the host, or it cannot be pinned."""
        layout = tuple((name, tensor.dtype, tensor.shape, tensor.device) for name, tensor in tensors.items())
        if layout != self._layout:
            self._layout, self._places = (), {}
            if not self._allocate(tensors):
                return None
            self._layout = layout
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._places[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # MPS has no event to wait for
        ready = None
        for device in devices:  # one at most
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        return HostCopy(dict(self._places), ready)

    def _allocate(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """A place for each tensor; False where there is none."""
        if len({tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}) > 1:
            return False
        if any(type(tensor.detach()) is not torch.Tensor or _is_sparse(tensor) for tensor in tensors.values()):
            return False
        if sum(_bytes_taken(tensor) for tensor in tensors.values()) > MAX_HOST_FRACTION * available_host_bytes():
            return False
        try:
            for name, tensor in tensors.items():
                pinned = tensor.device.type == "cuda"
                self._places[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        except (RuntimeError, MemoryError):
            self._places = {}
            return False
        return True


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.is_quantized


def _bytes_taken(tensor: torch.Tensor) -> int:
    """Of host memory; torch rounds pinned memory up to a power of two."""
    nbytes = tensor.nbytes
    return 1 << (nbytes - 1).bit_length() if tensor.device.type == "cuda" and nbytes else nbytes
