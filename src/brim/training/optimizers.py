"""The optimizer of a training run, with the arguments that the file gives it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from brim.errors import RequestError, first_line, nearest_names
from brim.settings.caller import named_as
from brim.settings.train_settings import TrainSettings
from brim.workloads.optimizers import optimizer_class

__all__ = ["make_training_optimizer", "optimizer_options"]


def optimizer_options(settings: TrainSettings) -> dict[str, Any]:
    """The arguments of the optimizer's class, checked against its signature."""
    name = settings.optimizer.name
    takes = _arguments(name)
    given = dict(settings.optimizer.params)
    if settings.hp.weight_decay is not None:
        given["weight_decay"] = settings.hp.weight_decay
    for key in given:
        if key not in takes:
            where = "hp.weight_decay" if key == "weight_decay" else f"optimizer.params.{key}"
            raise RequestError(f"{where}: {name} takes {', '.join(takes)}{nearest_names(key, takes)}")
    if name.lower() == "sgd":
        given.setdefault("momentum", 0.9)
    return {"lr": settings.hp.learning_rate, **{key: _value(value) for key, value in given.items()}}


def make_training_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer on these parameters; arguments it does not take are a `RequestError`."""
    make: Any = _named(name)
    try:
        optimizer: torch.optim.Optimizer = make(list(parameters), **options)
    except Exception as error:  # torch checks its arguments one by one: `betas: ""` is an IndexError
        raise RequestError(f"optimizer.params: {name} does not take {dict(options)}: {error}") from error
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"optimizer.name {name}: it evaluates the loss several times a step, and cannot go with micro-batches; "
            "take adamw or sgd"
        )
    _try_step(name, make, optimizer, options)
    return optimizer


def _try_step(name: str, make: Any, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    """One step on a weight of four numbers: some classes and arguments are refused only there."""
    like = optimizer.param_groups[0]["params"][0]
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
    weight.grad = torch.zeros_like(weight)
    try:
        make([weight], **options).step()
    except Exception as error:
        given = f" with {dict(options)}" if len(options) > 1 else ""
        raise RequestError(
            f"optimizer.name {name}: it cannot make a step{given} ({first_line(error)}); take adamw or sgd, or leave "
            "optimizer.params out"
        ) from error


def _named(name: str) -> type[torch.optim.Optimizer]:
    with named_as(optimizer="optimizer.name"):
        return optimizer_class(name)


def _arguments(name: str) -> list[str]:
    return [key for key in inspect.signature(_named(name)).parameters if key not in ("params", "lr", "self")]


def _value(value: Any) -> Any:
    """A list as torch wants it, and text that is a number, as YAML reads 1e-8, as one."""
    if isinstance(value, list):
        return tuple(_value(part) for part in value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
