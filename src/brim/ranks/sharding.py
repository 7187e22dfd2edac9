"""Weights, gradients and optimizer state dealt over the ranks (FSDP2): shards of a model, and whole states of them.

A sharded model talks to the other ranks inside every forward and backward, so every rank must run as many of them as
the others, and one that fails half-way cannot be waited for. Knows nothing of why a model is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.ranks.world import current_world

__all__ = ["load_whole_states", "local_part", "shard_model", "whole_states"]


def shard_model(model: nn.Module, device: torch.device) -> None:
    """Deal the parameters of every repeated block, and of what is left, over the ranks, in place."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise RequestError(f"training.fsdp: this torch has no fully_shard ({error}); it came with torch 2.6") from error
    mesh = init_device_mesh(device.type, (current_world().size,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of it, or its shard."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer put together from all shards, on the host; every rank must call it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return weights, state


def load_whole_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Deal whole states over the shards; every rank has them and calls it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(weights), options=options)
    set_optimizer_state_dict(model, optimizer, dict(state), options=options)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of containers that have weights; containers among them are entered."""
    for child in model.children():
        inside = isinstance(model, (nn.ModuleList, nn.Sequential))
        container = isinstance(child, (nn.ModuleList, nn.Sequential))
        if inside and not container and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _blocks(child)
