"""Random batch contents that leave every global random generator alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["random_floats", "random_integers"]


def random_floats(shape: Sequence[int], *, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `torch.randn`, but the same values on every call and without moving the global generator."""
    return torch.randn(tuple(shape), device=device, dtype=dtype, generator=_generator(device))


def random_integers(low: int, high: int, shape: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """As `torch.randint` (`high` excluded), with the same promises as `random_floats`."""
    return torch.randint(low, high, tuple(shape), device=device, generator=_generator(device))


def _generator(device: torch.device) -> torch.Generator | None:
    # Devices that exist only in a trace (meta, CUDA faked on a machine without it) have no generator to move.
    real = device.type in ("cpu", "mps") or (device.type == "cuda" and torch.cuda.is_available())
    return torch.Generator(device=device).manual_seed(0) if real else None
