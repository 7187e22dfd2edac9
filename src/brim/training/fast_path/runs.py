"""One or more runs of the same architecture behind one interface: a step, outputs, a state to restore.

`PlainRun` is one run as everybody writes it: a module, an optimizer of torch's, a backward pass. It serves what cannot
be stacked, rows that stay in host memory, and batches that are too large for one pass: their outputs are computed in
micro-batches without a graph, the criterion is taken over all of them, and each micro-batch runs again to carry its
part of the gradient back. So the step is that of the whole batch also where the criterion does not decompose over
samples, as a pairwise loss does not; it costs one more forward pass.
"""

from __future__ import annotations

import abc
import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.settings.caller import given, written
from brim.training.fast_path.task import Batch, Counts, RunSpec, Settings, TrainingTask
from brim.workloads.optimizers import make_optimizer

__all__ = ["NotStackableError", "PlainRun", "Runs"]


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


class PlainRun(Runs):
    """A run of its own."""

    stacked = False
    capturable = False

    def __init__(
        self,
        model: nn.Module,
        spec: RunSpec,
        task: TrainingTask,
        settings: Settings,
        device: torch.device,
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__((spec,), device)
        self.micro_batch_size = micro_batch_size
        self._module = model.to(device)
        self._criterion, self._inputs = task.criterion, task.inputs
        self._settings = settings
        learning = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._optimizer = make_optimizer(settings.optimizer, learning, spec.lr)
        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise RequestError(
                f"{given('optimizer', settings.optimizer)} evaluates the loss several times a step, which this "
                "training does "
                f"not do; {written('optimizer', 'adamw')} is the default"
            )
        for group in self._optimizer.param_groups:
            group.update(settings.optimizer_options)
        self._scaler = torch.amp.GradScaler(device.type, enabled=settings.loss_scaling)
        self._frozen = False
        self._skipped = 0
        self._remembered: dict[str, torch.Tensor] = {}

    def step(self, batch: Batch, counts: Counts, lr_factor: Any) -> torch.Tensor:
        """One optimizer step; a run that is frozen only computes its loss."""
        self._module.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch, counts)
        if self._frozen:
            return loss.reshape(1)
        for group in self._optimizer.param_groups:
            group["lr"] = self.specs[0].lr * float(lr_factor)
        if self._settings.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._module.parameters(), self._settings.clip_norm)
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._skipped += self._scaler.get_scale() < before
        return loss.reshape(1)

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        self._module.eval()
        with torch.no_grad(), self._autocast():
            result: torch.Tensor = self._module(rows.to(self.device))
        return result[None]

    def freeze(self, run: int) -> None:
        del run
        self._frozen = True

    def snapshot(self) -> Any:
        return copy.deepcopy((self._module.state_dict(), self._optimizer.state_dict(), self._scaler.state_dict()))

    def restore(self, snapshot: Any) -> None:
        weights, optimizer, scaler = snapshot
        self._module.load_state_dict(weights)
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))
        if scaler:
            self._scaler.load_state_dict(scaler)

    def remember(self, runs: Sequence[int]) -> None:
        del runs
        self._remembered = {name: part.detach().clone() for name, part in self._module.state_dict().items()}

    def weights(self, run: int, *, remembered: bool = False) -> dict[str, torch.Tensor]:
        del run
        parts = self._remembered if remembered else self._module.state_dict()
        return {name: part.detach().cpu().clone() for name, part in parts.items()}

    def skipped_steps(self) -> list[int]:
        return [self._skipped]

    def _backward(self, batch: Batch, counts: Counts) -> torch.Tensor:
        rows = batch[self._inputs]
        if self.micro_batch_size is None or len(rows) <= self.micro_batch_size:
            with self._autocast():
                loss = self._criterion(self._module(rows), batch, counts)
            torch.autograd.backward(self._scaler.scale(loss))
            return loss.detach()
        parts = rows.split(self.micro_batch_size)
        noise, kept = [], []
        for part in parts:
            noise.append(_random_state(self.device))
            with torch.no_grad(), self._autocast():
                kept.append(self._module(part))
        leaf = torch.cat(kept).requires_grad_()
        with self._autocast():
            loss = self._criterion(leaf, batch, counts)
        torch.autograd.backward(self._scaler.scale(loss))
        assert leaf.grad is not None
        for part, state, gradient in zip(parts, noise, leaf.grad.split(self.micro_batch_size), strict=True):
            _restore_random_state(self.device, state)  # dropout must drop the same again
            with self._autocast():
                outputs = self._module(part)
            torch.autograd.backward(outputs, gradient)
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        dtype = self._settings.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
