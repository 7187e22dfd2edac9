"""Optimizers on the CPU that choose as they would on CUDA: lists of tensors at once, with the temporaries of that."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from brim.forecasting.ghost import Ghost

__all__ = ["foreach_as_on_cuda"]

_MODULES = ("torch.optim.optimizer", "torch.optim.swa_utils", "torch.utils._foreach_utils")
_DEVICES = "_get_foreach_kernels_supported_devices"
_TYPES = "_foreach_supported_types"


@contextlib.contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Let `foreach=None` mean for CPU tensors inside the block what it means for CUDA tensors."""
    modules: list[Any] = [importlib.import_module(name) for name in _MODULES]
    before = [(module, getattr(module, _DEVICES, None), getattr(module, _TYPES, None)) for module in modules]
    for module, devices, types in before:
        if devices is not None:
            setattr(module, _DEVICES, lambda devices=devices: [*devices(), "cpu"])
        if types is not None:
            setattr(module, _TYPES, [*types, Ghost])
    try:
        yield
    finally:
        for module, devices, types in before:
            if devices is not None:
                setattr(module, _DEVICES, devices)
            if types is not None:
                setattr(module, _TYPES, types)
