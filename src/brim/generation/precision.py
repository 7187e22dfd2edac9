"""A half-precision model's results in float32, without a second copy of its weights: to see how much rounding does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["in_float32"]


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While inside, every module computes in float32, its weights converted for the moment of its call."""
    held: dict[nn.Module, dict[str, torch.Tensor]] = {}

    def widen(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        held[module] = {name: one.data for name, one in module._parameters.items() if one is not None}
        for name, data in held[module].items():
            module._parameters[name].data = data.float()  # type: ignore[union-attr]  # None was left out
        return tuple(map(_widened, arguments)), {name: _widened(value) for name, value in named.items()}

    def restore(module: nn.Module, *_: Any) -> None:
        for name, data in held.pop(module, {}).items():
            module._parameters[name].data = data  # type: ignore[union-attr]

    handles: list[Any] = []
    for module in model.modules():
        if module._parameters:
            handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        with _WidestFloat():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _WidestFloat(TorchFunctionMode):
    """While inside, functions that get two precisions compute in float32: a model may convert to its own on the way."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        given = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor) and one.is_floating_point()]
        in_place = getattr(func, "__name__", "").endswith("_")  # __setitem__ too
        if in_place or len({one.dtype for one in given}) < 2:
            return func(*args, **named)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
