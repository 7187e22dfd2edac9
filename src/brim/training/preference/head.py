"""The energy head: a small perceptron from features to one number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from brim.errors import RequestError
from brim.settings.caller import given, named, written
from brim.training.heads import MOST_WIDTH, refuse_too_wide

__all__ = ["EnergyHead", "make_heads", "perceptron", "seeded"]


class EnergyHead(nn.Module):
    """Features `[…, width]` → energies `[…]`; high energies mean out-of-distribution."""

    def __init__(self, width: int, hidden: Sequence[int] = (256, 128), *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = perceptron(width, hidden, 1, dropout=dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        energies: torch.Tensor = self.layers(features).squeeze(-1)
        return energies


def perceptron(width: int, hidden: Sequence[int], outputs: int, *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU, and dropout after each, between `width` and `outputs`."""
    if any(not 1 <= size <= MOST_WIDTH for size in hidden):
        raise RequestError(f"{written('hidden', ','.join(map(str, hidden)))}: a layer has from 1 to {MOST_WIDTH} units")
    if not 0 <= dropout < 1:
        raise RequestError(f"{given('dropout', dropout)}: it must lie from 0 up to 1")
    refuse_too_wide([width, *hidden, outputs], torch.get_default_dtype(), setting=named("hidden"))
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A model for each seed, the same whenever it is asked for; torch's own generator is left as it was."""

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


def make_heads(width: int, hidden: Sequence[int], *, dropout: float = 0.0) -> Callable[[int], nn.Module]:
    """The energy head of every seed."""
    return seeded(lambda: EnergyHead(width, hidden, dropout=dropout))
