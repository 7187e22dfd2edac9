"""One or more runs of the same architecture, as what trains them sees them: a step, outputs, a state to go back to."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from brim.training.fast_path.order import Counts
from brim.training.fast_path.problem import Batch, RunSpec

__all__ = ["NotStackableError", "Runs"]


class NotStackableError(Exception):
    """These runs cannot be trained as one; the message says why, and each can still be trained alone."""


class Runs(abc.ABC):
    """Runs that take their steps together; `stacked` ones want batches `[runs, rows, …]`, a single one `[rows, …]`."""

    stacked: bool
    capturable: bool  # whether a step stays on the device, so that a CUDA graph can hold it

    def __init__(self, specs: Sequence[RunSpec], device: torch.device) -> None:
        self.specs = tuple(specs)
        self.device = device

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.specs)

    @abc.abstractmethod
    def step(self, batch: Batch, counts: Counts, lr_factor: Any) -> torch.Tensor:
        """One optimizer step of every run that is not frozen; the losses before it, `[runs]`, on the device."""

    @abc.abstractmethod
    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """The outputs of every run on the same rows, `[runs, rows, …]`, in evaluation mode, without a graph."""

    @abc.abstractmethod
    def freeze(self, run: int) -> None:
        """From now on steps leave this run as it is."""

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """A copy of all that a step changes."""

    @abc.abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Back to the copy, in the same memory."""

    @abc.abstractmethod
    def remember(self, runs: Sequence[int]) -> None:
        """Keep these runs' weights as they are now, whatever later steps do."""

    @abc.abstractmethod
    def weights(self, run: int, *, remembered: bool = False) -> dict[str, torch.Tensor]:
        """A run's state dictionary, copied to the CPU: as it is now, or as it was remembered last."""

    def skipped_steps(self) -> list[int]:
        """For each run, the steps that were skipped because a scaled gradient was infinite."""
        return [0] * self.count
