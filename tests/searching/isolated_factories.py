"""Workloads that a child process imports by name: one that works, and others that die, hang or raise in their way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from brim.workloads.base import Workload
from brim.workloads.callables import CallableWorkload

UNMADE = 77  # no batch of this size can be made


def make_batch(size: int) -> torch.Tensor:
    return {}[size] if size == UNMADE else torch.ones(size, 256)


def above(size: int, what: Callable[[], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > size:
            what()
        return batch * 2

    return step


def build(data: Mapping[str, Any]) -> Workload:
    """The workload that `data["kind"]` names; whatever it does wrong, it does above `data["size"]` rows."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], object]] = {
        "works": lambda: None,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "aborts": os.abort,
        "hangs": lambda: time.sleep(3_600),
        "raises": lambda: [][1],
        "fatal": lambda: raise_(RuntimeError("CUDA error: an illegal memory access was encountered")),
    }
    if data["kind"] == "unbuildable":
        raise ValueError("no such width: 7")
    print("a line on standard output, as user code writes them", flush=True)
    os.system("echo and one from a child of the child")
    return CallableWorkload(step=above(data["size"], kinds[data["kind"]]), make_batch=make_batch, device="cpu")


def raise_(error: Exception) -> None:
    raise error
