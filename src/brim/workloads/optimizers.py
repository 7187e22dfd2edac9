"""Optimizers of `torch.optim` by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from brim.errors import RequestError, nearest_names
from brim.settings.caller import given, named

__all__ = ["make_optimizer", "optimizer_class"]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of `torch.optim` with that name in any case; an unknown one is a `RequestError`."""
    classes = {
        key.lower(): member
        for key, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer)
    }
    del classes["optimizer"]  # the base
    if name.lower() not in classes:
        near = nearest_names(name.lower(), classes)
        raise RequestError(
            f"{given('optimizer', name)}: torch {torch.__version__} has {', '.join(sorted(classes))}{near}"
        )
    return classes[name.lower()]


def make_optimizer(name: str, params: Iterable[torch.nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    """An optimizer by its name in any case: `adamw`, `sgd` (with momentum 0.9), `adafactor`, …"""
    make: Any = optimizer_class(name)
    options = {"lr": lr, "momentum": 0.9} if name.lower() == "sgd" else {"lr": lr}
    try:
        optimizer: torch.optim.Optimizer = make(list(params), **options)
    except (TypeError, ValueError) as error:  # no parameters, or a shape that the optimizer does not support (Muon)
        raise RequestError(
            f"{given('optimizer', name)} does not take this model's parameters: {error}; {named('optimizer')} adamw "
            "takes any"
        ) from error
    return optimizer
