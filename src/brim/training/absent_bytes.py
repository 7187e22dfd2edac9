"""Bytes that a training step will need and that do not exist yet: gradients and optimizer state.

Before the first optimizer step a micro-batch looks cheaper than every later one by just these bytes, so they are
reserved while the micro-batch is planned. The optimizer's state is counted by letting the same optimizer make one step
on tensors of the same shapes that have no memory. Of a sharded model this rank's part counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from brim.ranks.gradients import local_part

__all__ = ["absent_bytes", "state_bytes_when_made", "tensors_of_state"]

_GUESS = 2  # states as large as the weights, where the optimizer cannot be asked: what Adam keeps


def absent_bytes(optimizer: torch.optim.Optimizer, state_bytes: int) -> int:
    """Bytes of missing gradients, and of the state (`state_bytes` in all) as long as there is none."""
    parameters = _parameters(optimizer)
    gradients = sum(_bytes(parameter) for parameter in parameters if parameter.grad is None)
    has_state = any(optimizer.state.get(parameter) for parameter in parameters)
    return gradients + (0 if has_state else state_bytes)


def state_bytes_when_made(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer's state will have after its first step; nothing of the optimizer is changed."""
    try:
        return _state_bytes_of_twin(optimizer, optimizer.param_groups, device="meta")
    except (
        Exception
    ):  # it reads values, which tensors without memory do not have: one shape after the other, on the CPU
        return _state_bytes_shape_by_shape(optimizer)


def _state_bytes_shape_by_shape(optimizer: torch.optim.Optimizer) -> int:
    known: dict[tuple[Any, ...], int] = {}
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kind = (*parameter.shape, parameter.dtype)
            if kind not in known:
                try:
                    known[kind] = _state_bytes_of_twin(optimizer, [{**group, "params": [parameter]}], device="cpu")
                except Exception:
                    known[kind] = _GUESS * _bytes(parameter)
            total += known[kind]
    return total


def _state_bytes_of_twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], *, device: str) -> int:
    """Make one step with an optimizer of the same kind on tensors of the same shapes, and count what it keeps."""
    twins: list[dict[str, Any]] = []
    for group in groups:
        options = {name: copy.copy(value) for name, value in group.items() if name != "params"}
        for faster in ("foreach", "fused"):  # the states are the same
            if faster in options:
                options[faster] = False
        shapes = [
            torch.nn.Parameter(torch.zeros_like(local_part(parameter), device=device)) for parameter in group["params"]
        ]
        twins.append(options | {"params": shapes})
    make: Any = type(optimizer)
    twin: torch.optim.Optimizer = make(twins)
    for parameter in _parameters(twin):
        parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return sum(_bytes(tensor) for tensor in tensors_of_state(twin) if tensor.dim() > 0)


def tensors_of_state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Every tensor that the optimizer keeps."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bytes(tensor: torch.Tensor) -> int:
    part = local_part(tensor)
    return part.numel() * part.element_size()
