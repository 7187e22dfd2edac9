"""A workload from two functions of the user's own: `make_batch(size)` and `step(batch)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from brim.errors import RequestError
from brim.records import Mode, Unit
from brim.workloads.base import Workload, leading_length

__all__ = ["CallableWorkload", "returns_early"]

_T = TypeVar("_T")
_RETURN_EARLY = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def returns_early(function: Any) -> bool:
    """Whether calling it runs nothing of its body: a generator or an async function."""
    return any(kind(function) for kind in _RETURN_EARLY)


class CallableWorkload(Workload):
    """Wraps `step` and `make_batch`; `model`, `optimizer`, `scaler`, `scheduler` say what a step changes.

    Each of the four is one object or a sequence of them. Without `device` it is the device of the model's first
    parameter, else CUDA where there is one, else the CPU. With `key` the plan is cached under it: two different
    steps need two different keys.

        workload = CallableWorkload(step=lambda x: model(x), make_batch=lambda n: torch.randn(n, 8), model=model)
    """

    def __init__(
        self,
        *,
        step: Callable[[Any], Any],
        make_batch: Callable[[int], Any],
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        scheduler: Any = None,
        batch_length: Callable[[Any], int] | None = None,
        unit: Unit = "samples",
        device: torch.device | str | None = None,
        key: str | None = None,
        mode: Mode | None = None,
        largest_size: int | None = None,
    ) -> None:
        for name, value in (("step", step), ("make_batch", make_batch), ("batch_length", batch_length)):
            if value is not None or name != "batch_length":
                _check_callable(name, value)
        self._step = step
        self._make_batch = make_batch
        self._batch_length = batch_length or leading_length
        self._modules = _several("model", model, nn.Module)
        self._optimizers = _several("optimizer", optimizer, torch.optim.Optimizer)
        self._stateful = (*_several("scaler", scaler, object), *_several("scheduler", scheduler, object))
        self.unit = _one_of("unit", unit, get_args(Unit))
        self.mode = _one_of("mode", mode or ("train" if self._optimizers else "forward"), get_args(Mode))
        self.device = _default_device(self._modules) if device is None else torch.device(device)
        self._key = key
        self._largest_size = largest_size

    def make_batch(self, size: int) -> Any:
        """The user's `make_batch(size)`."""
        return self._make_batch(size)

    def step(self, batch: Any) -> Any:
        """The user's `step(batch)`."""
        return self._step(batch)

    def batch_length(self, batch: Any) -> int:
        """The user's `batch_length(batch)`, or the leading dimension."""
        return self._batch_length(batch)

    def modules(self) -> Sequence[nn.Module]:
        """The modules given as `model`."""
        return self._modules

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers given as `optimizer`."""
        return self._optimizers

    def stateful(self) -> Sequence[Any]:
        """What was given as `scaler` and `scheduler`."""
        return self._stateful

    def functions(self) -> Sequence[Any]:
        """The user's `step`."""
        return (self._step,)

    def largest_size(self) -> int | None:
        """The largest useful size, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """The `key`, if one was given."""
        return None if self._key is None else {"key": self._key}


def _several(name: str, value: Any, kind: type[_T]) -> tuple[_T, ...]:
    if value is None:
        return ()
    # nn.Sequential and nn.ModuleList are one module, not a sequence of them.
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for member in values:
        if not isinstance(member, kind):
            raise RequestError(f"{name}={member!r}: expected a {kind.__name__} or a sequence of them")
    return values


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise RequestError(f"{name}={value!r}: it must be one of {', '.join(allowed)}")
    return value


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        takes = {"step": "a batch", "make_batch": "a size", "batch_length": "a batch"}[name]
        raise RequestError(f"{name}={value!r}: expected a function that takes {takes}")
    if returns_early(value):
        raise RequestError(
            f"{name}={value!r}: a generator or an async function returns before its body runs; give a plain function "
            "around all that it does"
        )


def _default_device(modules: Sequence[nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
