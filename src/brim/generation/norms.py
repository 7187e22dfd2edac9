"""Root-mean-square norms as one kernel: transformers writes them as eight operations, a sixth of the time of a prompt.

A norm is replaced only while inside, and only where the kernel gives the same result up to rounding.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch
from torch import nn

__all__ = ["FusedNorms", "fused_norms"]

ROUNDING = 2e-2  # relative, in half precision


class FusedNorms:
    """While open, the norms run as one kernel each."""

    def __init__(self, norms: list[tuple[nn.Module, Any]]) -> None:
        self._norms = norms

    def __len__(self) -> int:
        return len(self._norms)

    def __enter__(self) -> None:
        for norm, forward in self._norms:
            norm.forward = forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for norm, _ in self._norms:
            del norm.forward


def fused_norms(model: nn.Module) -> FusedNorms:
    """The norms of a model that can be replaced; none on the CPU, where nothing is gained."""
    found = []
    checked: dict[tuple[type, int], bool] = {}
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), _epsilon(module)
        if not type(module).__name__.endswith("RMSNorm") or epsilon is None or "forward" in vars(module):
            continue
        if not isinstance(weight, torch.Tensor) or not weight.is_cuda or weight.dim() != 1:
            continue
        forward = functools.partial(_fused, weight, epsilon)
        key = (type(module), weight.shape[0])
        if key not in checked:
            checked[key] = _agrees(module, forward, weight)
        if checked[key]:
            found.append((module, forward))
    return FusedNorms(found)


def _epsilon(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _fused(weight: torch.Tensor, epsilon: float, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, epsilon)


@torch.inference_mode()
def _agrees(module: nn.Module, forward: Any, weight: torch.Tensor) -> bool:
    generator = torch.Generator(device=weight.device).manual_seed(0)
    shape = (1, 8, weight.shape[0])
    states = torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator)
    theirs, ours = module(states).float(), forward(states).float()
    return bool(torch.allclose(ours, theirs, rtol=ROUNDING, atol=ROUNDING))
