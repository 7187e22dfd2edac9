"""Real steps under a CPU limit, of every shape: `largest` is what bisection over the same metered step finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.memory.devices import CpuMemory

KIB = 1024
Step = Callable[[torch.Tensor], Any]


class Training:
    """A linear layer trained with AdamW: affine bytes."""

    def __init__(self) -> None:
        self.model = nn.Linear(32, 32)
        self.optimizer: torch.optim.Optimizer | None = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: torch.Tensor) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()


class Pairwise(Training):
    """A loss over all n×n pairs: quadratic bytes."""

    def step(self, batch: torch.Tensor) -> None:
        energies = self.model(batch).mean(dim=1)
        torch.nn.functional.softplus(energies[:, None] - energies[None, :]).mean().backward()


class Padded(Training):
    """A batch padded to multiples of 32 rows: a staircase."""

    def step(self, batch: torch.Tensor) -> None:
        room = torch.zeros(-(-len(batch) // 32) * 32, 512)
        room[: len(batch), :1] = batch[:, :1]
        room.square_()


class HugeConstant(Training):
    """A buffer a thousand times as large as a sample's own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("table", torch.zeros(1024, 256))

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).relu().sum().backward()


class Steepens(Training):
    """From 100 samples on a step needs a workspace that grows sixteen times as fast."""

    def step(self, batch: torch.Tensor) -> None:
        rows = batch * 2
        if len(batch) > 100:
            rows = rows + batch.new_zeros(len(batch) - 100, 512).sum()
        rows.sum()


def make_batch(size: int) -> torch.Tensor:
    return torch.ones(size, 32)


def fits(case: Training, size: int, limit: int) -> bool:
    """Whether some steps run under the limit, from the same start as a probe: weights and state, no gradients."""
    memory = CpuMemory(torch.device("cpu"))
    resident = [*case.model.parameters(), *case.model.buffers()]
    state = [] if case.optimizer is None else [t for s in case.optimizer.state.values() for t in s.values()]
    case.model.zero_grad()
    try:
        with memory.limited(limit), memory.metered([*resident, *state]):
            batch = make_batch(size)
            for _ in range(2):
                case.step(batch)
    except torch.OutOfMemoryError:
        return False
    finally:
        case.model.zero_grad()
    return True


def true_largest(case: Training, limit: int, bound: int = 4096) -> int:
    low, high = 0, bound + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(case, middle, limit) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("kind", "limit", "probes"),
    [
        (Training, 150 * KIB, 8),
        (Training, 777_777, 8),
        (Pairwise, 1_000_003, 8),
        (Padded, 900 * KIB, 14),
        (HugeConstant, 1_200 * KIB, 8),
        (Steepens, 400 * KIB, 14),
    ],
)
def test_largest_is_exactly_what_brute_force_finds(kind: type[Training], limit: int, probes: int) -> None:
    case = kind()
    plan = brim.find_batch_size(
        case.step, make_batch, model=case.model, optimizer=case.optimizer, objective="largest", memory_limit=limit,
        max_batch_size=4096,
    )  # fmt: skip
    case.step(make_batch(1))  # from here on the optimizer's state exists, as it does in every probe after the first
    expected = true_largest(case, limit)
    assert 1 < expected < 4096
    assert plan.batch_size == plan.batch_size_max == expected
    assert len(plan.probes) <= probes
    assert plan.memory.limit_bytes == limit
    if probes == 8:
        assert plan.oom_events <= 1
