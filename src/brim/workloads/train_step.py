"""A whole training step: forward, backward, optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.records import Mode
from brim.workloads.base import Workload, in_mode

__all__ = ["TrainStepWorkload", "materialise_state"]


class TrainStepWorkload(Workload):
    """Runs `loss(model, batch)`, its backward and the optimizer's step on each batch, in training mode.

    `autocast_dtype` runs the loss under autocast over the weights as they are; float16 needs a `scaler` too. `repeats`:
    every loss is computed by the same operations, so that a forecast need not trace a second step.

        workload = TrainStepWorkload(
            model=net, make_batch=lambda n: (images(n), labels(n)), device="cuda",
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.AdamW(net.parameters()),
        )
    """

    mode: Mode = "train"

    def __init__(
        self,
        *,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        loss: Callable[[nn.Module, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        autocast_dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        identity: Mapping[str, Any] | None = None,
        smallest_size: int = 1,
        largest_size: int | None = None,
        repeats: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.device = torch.device(device)
        self._make_batch = make_batch
        self._loss = loss
        self._autocast_dtype = autocast_dtype
        self._identity = identity
        self._smallest_size = smallest_size
        self._largest_size = largest_size
        self._repeats = repeats
        self._needs_closure = _needs_closure(optimizer)
        self._keeps_state = not self._needs_closure  # until a step shows otherwise
        if self.scaler is not None and self._needs_closure:
            raise RequestError(
                f"optimizer {type(optimizer).__name__} evaluates the loss itself, which a gradient scaler does not "
                "allow; use bfloat16 or float32, or another optimizer"
            )

    def make_batch(self, size: int) -> Any:
        """The batch that `make_batch=` gives for the size."""
        return self._make_batch(size)

    def step(self, batch: Any) -> torch.Tensor:
        """One training step; returns the loss, without its graph."""
        with in_mode(self.model, training=True):
            if self._needs_closure:
                return torch.tensor(self.optimizer.step(lambda: float(self._backward(batch))))
            loss = self._backward(batch)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.materialise_optimizer_state()
            return loss

    def materialise_optimizer_state(self) -> None:
        """Create the optimizer's state if a gradient scaler has skipped the steps that would have created it."""
        if self._keeps_state:
            self._keeps_state = materialise_state(self.optimizer)  # plain SGD never has any: do not check again

    def begin_repeat(self) -> bool:
        """Drop the gradients: after that all steps are alike, but that the first makes the optimizer's state."""
        if not self._repeats or self._needs_closure or self.scaler is not None:
            return False
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return (self.model,)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizer."""
        return (self.optimizer,)

    def stateful(self) -> Sequence[Any]:
        """The gradient scaler, where there is one."""
        return () if self.scaler is None else (self.scaler,)

    def smallest_size(self) -> int:
        """The smallest size that can be trained on."""
        return self._smallest_size

    def largest_size(self) -> int | None:
        """The largest useful size, if one was given."""
        return self._largest_size

    def identity(self) -> Mapping[str, Any] | None:
        """What a cached plan is stored under, if it was given."""
        return self._identity

    def _backward(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        use_autocast = self._autocast_dtype is not None
        with torch.autocast(self.device.type, dtype=self._autocast_dtype, enabled=use_autocast):
            loss = self._loss(self.model, batch)
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
        return loss.detach()


def materialise_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create an optimizer's state where a gradient scaler has skipped the steps so far; whether it keeps any.

    A float16 run skips its first steps while the scale is too large, so that its first batches would need less
    memory than later ones, by the size of the optimizer state. One plain optimizer step on zeroed gradients creates the
    state; the gradients are not needed any more, as the step was skipped.
    """
    if not _lacks_state(optimizer):
        return True
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad.zero_()
    optimizer.step()
    return not _lacks_state(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        parameter.grad is not None and not optimizer.state.get(parameter) for parameter in _parameters(optimizer)
    )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without a closure, as LBFGS's cannot."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
