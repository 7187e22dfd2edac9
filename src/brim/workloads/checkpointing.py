"""Gradient checkpointing for any model: by its own method where it has one, else around its repeated blocks.

The recomputed forward draws the same random numbers as the first one, so gradients are the same as without.
Batch normalisation is an exception: both forwards update its running statistics (in training the gradients do not
depend on them).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.errors import RequestError, plural
from brim.settings.caller import named

__all__ = ["can_checkpoint", "enable_gradient_checkpointing"]


def can_checkpoint(model: nn.Module) -> bool:
    """Whether `enable_gradient_checkpointing` would succeed; the model is not changed."""
    if hasattr(model, "gradient_checkpointing_enable") and getattr(model, "supports_gradient_checkpointing", True):
        return True
    if _enable_timm(model):
        model.set_grad_checkpointing(False)  # type: ignore[operator]
        return True
    return any(True for _ in _blocks(model)) or any(_is_long_sequence(module) for module in model.modules())


def enable_gradient_checkpointing(model: nn.Module) -> str:
    """Make the model recompute activations in the backward instead of keeping them; returns a note on what was done.

    Uses transformers' `gradient_checkpointing_enable` or timm's `set_grad_checkpointing` where the model has it.
    Otherwise every block of its `nn.Sequential` and `nn.ModuleList` containers is checkpointed on its own, or, when
    these hold only single layers, each sequence in about √n segments. A model with neither is a `RequestError`.
    """
    if _enable_transformers(model):
        return f"gradient checkpointing: {type(model).__name__}'s own (transformers)"
    if _enable_timm(model):
        return f"gradient checkpointing: {type(model).__name__}'s own (timm)"
    blocks = list(_blocks(model))
    for name, block in blocks:
        _replace_forward(block, functools.partial(_checkpointed_call, name, block.forward))
    if blocks:
        return f"gradient checkpointing: {plural(len(blocks), 'block')}, {blocks[0][0]} to {blocks[-1][0]}"
    sequences = [(name, module) for name, module in model.named_modules() if _is_long_sequence(module)]
    for _, sequence in sequences:
        _checkpoint_segments(sequence)
    if sequences:
        return f"gradient checkpointing: {', '.join(name or 'the model' for name, _ in sequences)} in segments"
    raise RequestError(
        f"{named('gradient_checkpointing')}: {type(model).__name__} has no repeated blocks in an nn.Sequential or "
        "nn.ModuleList to checkpoint; leave it out, or use torch.utils.checkpoint inside the model"
    )


def _enable_transformers(model: nn.Module) -> bool:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        return False
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True


def _enable_timm(model: nn.Module) -> bool:
    enable = getattr(model, "set_grad_checkpointing", None)
    if enable is None:
        return False
    try:
        enable(True)
    except (AssertionError, NotImplementedError):  # timm raises these for architectures that do not support it
        return False
    return True


def _blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of several layers in containers; containers of blocks are searched, too."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(model, (nn.Sequential, nn.ModuleList)) and not _is_leaf(child) and not _holds_blocks(child):
            yield path, child
        else:
            yield from _blocks(child, f"{path}.")


def _holds_blocks(module: nn.Module) -> bool:
    """A stage: a container of blocks rather than of single layers, so it is searched, not checkpointed as a whole."""
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    return is_container and any(not _is_leaf(child) for child in module.children())


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_long_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) >= 4


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    current = vars(module).get("forward")
    if isinstance(current, functools.partial) and current.func in (_checkpointed_call, _segmented_call):
        return  # checkpointed already: recomputing twice would save nothing
    vars(module)["forward"] = forward


def _checkpointed_call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = _versions(args)
    output = checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)
    if _versions(args) != before:
        raise RequestError(
            f"{named('gradient_checkpointing')}: block {name} changes its input in place, so computing it again would "
            "give other values; leave it out, or build the model with inplace=False"
        )
    return output


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [arg._version for arg in args if isinstance(arg, torch.Tensor)]


def _checkpoint_segments(sequence: nn.Sequential) -> None:
    """Group layers into about √n segments, none of which begins with a layer that works in place on its input."""
    layers = list(sequence)
    length = max(2, round(math.sqrt(len(layers))))
    segments: list[list[nn.Module]] = []
    for layer in layers:
        may_begin = not getattr(layer, "inplace", False)
        if not segments or (len(segments[-1]) >= length and may_begin):
            segments.append([])
        segments[-1].append(layer)
    functions = [nn.Sequential(*segment) for segment in segments]
    _replace_forward(sequence, functools.partial(_segmented_call, functions))


def _segmented_call(functions: list[nn.Sequential], value: Any) -> Any:
    for segment in functions[:-1]:  # not the last: the backward starts with it, and needs its activations at once
        value = _checkpointed_call("segment", segment, value)
    return functions[-1](value)
