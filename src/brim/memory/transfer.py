"""Tensors on their way to a device, handled as little as can be on the host.

Putting samples together on the host costs a copy of all their bytes into memory that is new each time, and locking that
for the device another one. So they are copied one by one to where they belong in a batch that lies on the device: from
pinned memory nothing waits, and nothing but the batch is ever allocated. Small ones are put together in pinned memory
first: a copy to the device costs the host some microseconds, however little it copies.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["end_to_end", "mapping_like", "moved", "on_device", "replaced", "stacked"]

MIN_COPIED_APART_BYTES = 1 << 16  # starting a copy takes the host as long as copying this much itself


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """The value with everything of a kind replaced; what holds it becomes a plain dictionary, list or tuple.

    Named tuples keep their names, and mappings that are no dictionaries (a tokeniser's `BatchEncoding`) their type.
    """
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, Mapping):
        return mapping_like(value, {key: replaced(part, kind, by) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        parts = [replaced(part, kind, by) for part in value]
        if isinstance(value, list):
            return parts
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def mapping_like(whole: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """The values in a mapping of the same type; plain for a dictionary, and where the type cannot be written to."""
    if isinstance(whole, dict) or not isinstance(whole, MutableMapping):
        return values
    made = copy.copy(whole)
    for key, value in values.items():
        made[key] = value
    return made


def moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor on the device, in `dtype` if given; the host does not wait for CUDA."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, dtype=dtype, non_blocking=True)
    return tensor.to(device, dtype=dtype)


class _Movable(abc.ABC):  # noqa: B024
    """A tensor, or what a `collate_fn` has made of tensors that moves itself: a packed sequence, a graph."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "to") and (issubclass(other, PackedSequence) or not issubclass(other, (Mapping, tuple)))


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch of the caller's with all its tensors on the device."""
    return replaced(
        batch, _Movable, lambda one: moved(one, device) if isinstance(one, torch.Tensor) else one.to(device)
    )


def stacked(parts: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Tensors of one shape above each other; on a CUDA device if one is given, else where they are."""
    first = parts[0]
    if not _fills_on(device) or any(part.shape != first.shape for part in parts):
        return torch.stack(list(parts))
    if first.nbytes < MIN_COPIED_APART_BYTES and all(part.device.type == "cpu" for part in parts):
        together = torch.empty((len(parts), *first.shape), dtype=first.dtype, pin_memory=True)
        torch.stack(list(parts), out=together)
        return together.to(device, non_blocking=True)
    whole = torch.empty((len(parts), *first.shape), dtype=first.dtype, device=device)
    for place, part in zip(whole.unbind(), parts, strict=True):
        place.copy_(part, non_blocking=True)
    return whole


def end_to_end(parts: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Along the first dimension, as `stacked`; where another dimension differs, filled up with zeros."""
    shape = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].dim())]
    even = all(list(part.shape[1:]) == shape for part in parts)
    if even and not _fills_on(device):
        return torch.cat(list(parts))
    make = torch.empty if even else torch.zeros
    where = device if _fills_on(device) else parts[0].device
    whole = make((sum(part.shape[0] for part in parts), *shape), dtype=parts[0].dtype, device=where)
    start = 0
    for part in parts:
        place = (slice(start, start + part.shape[0]), *(slice(0, size) for size in part.shape[1:]))
        whole[place].copy_(part, non_blocking=True)
        start += part.shape[0]
    return whole


def _fills_on(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
