"""Weights on their way to a device; where they do not fit: the bytes needed, the bytes free, and who holds the rest.

Knows nothing of batches: a card that is full when a model is loaded has no smaller size to try.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypeVar

import torch
from torch import nn

from brim.errors import DoesNotFitError
from brim.memory.devices import device_uuid, memory_of
from brim.memory.failures import Failure, FailureKind, classify
from brim.monitor.nvml import device_memory, processes_on
from brim.settings.caller import named
from brim.settings.sizes import format_bytes

__all__ = ["load_failure", "place_weights"]

_Module = TypeVar("_Module", bound=nn.Module)

MOST_PROCESSES = 4  # named in a message, those that hold most


def place_weights(
    module: _Module, device: torch.device | str, *, name: str, dtype: torch.dtype | None = None
) -> _Module:
    """`module.to(device, dtype)`; weights that do not fit are a `DoesNotFitError` that says who holds the memory."""
    try:
        return module.to(device) if dtype is None else module.to(device=device, dtype=dtype)
    except Exception as error:
        failure = load_failure(
            error, device, what=f"{name}: the weights do not fit", needed_bytes=_bytes_in(module, dtype)
        )
        if failure is None:
            raise
        raise failure from error


def load_failure(
    error: BaseException, device: torch.device | str | None, *, what: str, needed_bytes: int | None = None
) -> DoesNotFitError | None:
    """What to raise where memory ran out and no smaller batch could help; None where `error` is not about memory.

    Without a device it is CUDA's current one, if this process uses CUDA, else the host.
    """
    failure = classify(error)
    if failure.kind is not FailureKind.OUT_OF_MEMORY:
        return None
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    return DoesNotFitError(
        f"{what}: not enough memory on {device}: {_needed(failure, needed_bytes)}{_room_on(torch.device(device))} "
        f"({failure.reason}).\nEnd what holds the memory, choose another {named('device')}, or load less: "
        f"{named('dtype')} bfloat16 "
        "halves what is in float32"
    )


def _needed(failure: Failure, needed_bytes: int | None) -> str:
    if needed_bytes is not None:
        return f"{format_bytes(needed_bytes)} needed, "
    return f"{format_bytes(failure.requested_bytes)} more needed, " if failure.requested_bytes else ""


def _bytes_in(module: nn.Module, dtype: torch.dtype | None) -> int:
    """What the weights and buffers take once they are on the device; `dtype` is for those that are floating-point."""
    total = 0
    for tensor in (*module.parameters(), *module.buffers()):
        converted = dtype is not None and tensor.is_floating_point()
        total += tensor.numel() * (dtype.itemsize if converted and dtype is not None else tensor.element_size())
    return total


def _room_on(device: torch.device) -> str:
    """`2.0 GiB of 80.0 GiB free; process 42 holds 77.1 GiB`, as far as the driver reports it; never an error."""
    if device.type != "cuda":
        return f"{format_bytes(memory_of(device).available_bytes())} free"
    uuid = None
    with contextlib.suppress(RuntimeError, AssertionError):  # a card too full for a CUDA context cannot be asked
        uuid = device_uuid(memory_of(device).device)
    text = "free memory unknown"
    card = device_memory(uuid, device.index or 0)
    if card is not None:
        free = max(card.total_bytes - card.used_bytes, 0)
        text = f"{format_bytes(free)} of {format_bytes(card.total_bytes)} free"
    else:
        with contextlib.suppress(RuntimeError, AssertionError):
            free, total = torch.cuda.mem_get_info(device)
            text = f"{format_bytes(free)} of {format_bytes(total)} free"
    held = sorted(processes_on(uuid, device.index or 0), key=lambda process: -(process.used_bytes or 0))
    for process in held[:MOST_PROCESSES]:
        who = "this process" if process.pid == os.getpid() else f"process {process.pid}"
        amount = "memory" if process.used_bytes is None else format_bytes(process.used_bytes)
        text += f"; {who} holds {amount}"
    if not held and card is not None and card.used_by_others_bytes:
        text += f"; {format_bytes(card.used_by_others_bytes)} are held by processes that the driver does not name here"
    return text
