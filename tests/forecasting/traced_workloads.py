"""Small workloads for the tests of the tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.workloads.callables import CallableWorkload
from brim.workloads.train_step import TrainStepWorkload

Loss = Callable[[nn.Module, Any], torch.Tensor]


def training(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> TrainStepWorkload:
    return TrainStepWorkload(
        model=model,
        make_batch=make_batch,
        loss=loss or (lambda model, batch: model(batch).square().mean()),
        optimizer=optimizer or torch.optim.AdamW(model.parameters()),
        device="cpu",
        **options,
    )


def perceptron(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64)


def convolutional() -> TrainStepWorkload:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return training(
        model,
        lambda n: (torch.randn(n, 3, 64, 64), torch.zeros(n, dtype=torch.long)),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    )


class Residual(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.outer(functional.relu(self.inner(hidden)))
        return result


def pairwise() -> CallableWorkload:
    """The preference loss over all pairs of a batch, from two functions."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        inside, outside = model(batch[:, 0]).squeeze(-1), model(batch[:, 1]).squeeze(-1)
        loss = functional.softplus(-0.1 * (outside[None, :] - inside[:, None])).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return CallableWorkload(step=step, make_batch=lambda n: torch.randn(n, 2, 64), model=model, optimizer=optimizer)
