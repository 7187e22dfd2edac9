"""Weights that do not fit: the message has the bytes needed, the bytes free, and the processes that hold the rest."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import DoesNotFitError
from brim.memory import weights
from brim.monitor.nvml import DeviceMemoryUse, ProcessMemory

GIB = 2**30


def full_card(monkeypatch: pytest.MonkeyPatch, *processes: ProcessMemory) -> str:
    """What is said of a card of 80 GiB with 2 GiB free, on which these processes run."""
    card = DeviceMemoryUse(
        total_bytes=80 * GIB, used_bytes=78 * GIB, used_by_this_process_bytes=None, used_by_others_bytes=78 * GIB
    )
    monkeypatch.setattr(weights, "device_memory", lambda *asked: card)
    monkeypatch.setattr(weights, "processes_on", lambda *asked: processes)

    def to(self: nn.Module, *arguments: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(nn.Module, "to", to)
    with pytest.raises(DoesNotFitError) as caught:
        weights.place_weights(nn.Linear(1024, 256, bias=False), "cuda:0", name="net", dtype=torch.bfloat16)
    return str(caught.value)


def test_the_processes_that_hold_most_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessMemory(pid=os.getpid(), used_bytes=GIB)
    message = full_card(
        monkeypatch, own, ProcessMemory(pid=42, used_bytes=77 * GIB), ProcessMemory(pid=7, used_bytes=None)
    )
    assert "net: the weights do not fit" in message
    assert "512.0 KiB needed, 2.0 GiB of 80.0 GiB free" in message
    assert "process 42 holds 77.0 GiB; this process holds 1.0 GiB; process 7 holds memory" in message


def test_processes_that_the_driver_does_not_list_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "78.0 GiB are held by processes that the driver does not name here" in full_card(monkeypatch)


def test_an_error_that_is_not_about_memory_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def to(self: nn.Module, *arguments: Any, **more: Any) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr(nn.Module, "to", to)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        weights.place_weights(nn.Linear(2, 2), "cpu", name="net")


def test_weights_that_fit_are_placed_in_their_dtype() -> None:
    assert (
        weights.place_weights(nn.Linear(2, 2), "cpu", name="net", dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    )
    assert weights.place_weights(nn.Linear(2, 2), "cpu", name="net").weight.dtype == torch.float32
