"""Models whose weights are never made: left on the meta device, and given ghosts for a trace."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from brim.forecasting.ghost import Ghost, make_ghost
from brim.forecasting.ledger import Ledger
from brim.forecasting.tracer import Tracer

__all__ = ["give_meta_tensors_ghosts"]


def give_meta_tensors_ghosts(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Put ghosts in the place of parameters and buffers on the meta device; whoever calls this puts them back."""
    made: dict[int, Ghost] = {}
    for root in modules:
        for module in root.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.device.type == "meta":
                        held[name] = _ghost_for(tensor, made)  # type: ignore[assignment]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]


def _ghost_for(tensor: torch.Tensor, made: dict[int, Ghost]) -> Ghost:
    if id(tensor) not in made:
        ghost = make_ghost(tensor.shape, tensor.stride(), tensor.dtype, torch.device("cpu"), None)
        if isinstance(tensor, nn.Parameter):
            vars(ghost)["_is_param"] = True
            ghost.requires_grad_(tensor.requires_grad)
        made[id(tensor)] = ghost
    return made[id(tensor)]


@functools.cache
def _quiet_tracer() -> Tracer:
    return Tracer(Ledger())


def _answer_outside(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Outside of any trace a ghost still has a shape, a dtype and views; nothing is booked."""
    del types
    with _quiet_tracer():
        return func(*args, **kwargs)


Ghost.outside = staticmethod(_answer_outside)
