"""Small problems that the fast path's tests train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.molecules.losses import PreferenceLoss
from brim.training.fast_path.task import RowData, RunSpec, TrainingTask

ENERGY = PreferenceLoss()


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


def head(width: int = 6, hidden: int = 5, dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0)).to(dtype)


def preference_criterion(outputs: torch.Tensor, batch: Any, counts: tuple[int, ...]) -> torch.Tensor:
    return ENERGY(outputs[: counts[0]], outputs[counts[0] :])


def preference_rows(inner: int = 23, outer: int = 17, width: int = 6, dtype: torch.dtype = torch.float64) -> RowData:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(inner + outer, width, generator=generator, dtype=dtype)
    rows[inner:] += 0.7
    return RowData(tensors={"features": rows}, lengths=(inner, outer))


def preference_problem(build: Callable[[], nn.Module] = head, **more: Any) -> TrainingTask:
    settings = {"make_model": seeded(build), "data": preference_rows(), "criterion": preference_criterion, **more}
    return TrainingTask(**settings)


def supervised_problem(build: Callable[[], nn.Module], rows: int = 24, **more: Any) -> TrainingTask:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    labels = (features[:, 0] > 0).long() + (features[:, 1] > 0).long()

    def criterion(outputs: torch.Tensor, batch: Any, counts: tuple[int, ...]) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"])

    data = RowData(tensors={"features": features, "labels": labels}, lengths=(rows,))
    return TrainingTask(**{"make_model": seeded(build), "data": data, "criterion": criterion, **more})


def specs(count: int, lr: float = 1e-2) -> list[RunSpec]:
    return [RunSpec(seed=seed, lr=lr * (1 + seed)) for seed in range(count)]
