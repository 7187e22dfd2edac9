"""The end of a window: gradients of all ranks made one, weighed, measured, clipped, and applied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError, LostError
from brim.memory.devices import DeviceMemory
from brim.memory.failures import Failure, FailureKind, classify
from brim.memory.snapshot import StateSnapshot, required_bytes
from brim.monitor.host import available_host_bytes
from brim.ranks.gradients import RankGroup
from brim.ranks.sharding import local_part
from brim.settings.caller import named
from brim.training.micro_batches import MicroBatches, WindowDone, gradient_square

__all__ = ["OptimizerStep", "WindowSums"]

GUARDED_STEPS = 2  # in the first the state appears, in the second everything is there
HOST_SHARE = 0.5  # of the free host memory that a guard may take


class WindowSums:
    """A window's figures over all ranks, on their way from the device.

    [total loss, weight, Σ|g_small|², Σ1/small, ranks that measured, |g_large|²]. The copy is started at once and waited
    for when it is read: reading the tensor itself would wait for everything that the device was given since.
    """

    def __init__(self, sums: torch.Tensor, large_square: torch.Tensor | None) -> None:
        last = torch.full_like(sums[:1], math.nan) if large_square is None else large_square.to(sums).reshape(1)
        figures = torch.cat([sums, last])
        self._ready: Any = None
        self._host = figures
        if figures.device.type == "cuda":
            self._host = torch.empty_like(figures, device="cpu", pin_memory=True).copy_(figures, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(figures.device))

    def read(self) -> dict[str, float | None]:
        """Wait for the figures."""
        if self._ready is not None:
            self._ready.synchronize()
        total, weight, small, inverse, measured, large = self._host.tolist()
        noisy = not math.isnan(large) and measured > 0 and inverse > 0
        return {
            "loss": total / weight if weight else math.nan,
            "total": total,
            "weight": weight,
            "small": small / measured if noisy else None,
            "small_batch": measured / inverse if noisy else None,
            "large": large if noisy else None,
        }


class OptimizerStep:
    """Makes a step of the gradients that a window left."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: DeviceMemory,
        micro: MicroBatches,
        group: RankGroup,
        scaler: torch.amp.GradScaler | None = None,
        gradient_clip: float | None = None,
        guarded: bool = True,
        sharded: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.skipped = 0  # steps that a gradient scaler left out
        self._model = model
        self._memory = memory
        self._micro = micro
        self._group = group
        self._scaler = scaler
        self._gradient_clip = gradient_clip
        self._guarded = guarded
        self._sharded = sharded  # gradients are summed by the model itself
        self._steps = 0

    def absent(self) -> list[int]:
        """The places of parameters without a gradient."""
        return [place for place, parameter in enumerate(self.parameters) if parameter.grad is None]

    def make(self, done: WindowDone, samples: int, *, absent: Iterable[int] = (), measured: bool = False) -> WindowSums:
        """Sum, weigh, measure (where the window's first micro-batch was), clip, apply."""
        sums = self._sums(done)
        if self._sharded:
            self._group.add_up(sums)
        else:
            self._group.sum_gradients(self.parameters, sums, absent=absent)
        if not self._micro.gradients.objective.counts_samples:  # tokens, say: how many all ranks have is known only now
            self._scale_gradients(samples / sums[1])
        large = None
        if measured:
            large = gradient_square(self.parameters)
            if self._scaler is not None:
                large = large / self._scaler.get_scale() ** 2
        self._apply_guarded()
        self._steps += 1
        return WindowSums(sums, large)

    def _sums(self, done: WindowDone) -> torch.Tensor:
        device = self._memory.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        small, seen = done.small_square, done.small_square is not None
        inverse = 1.0 / done.small_weight if seen else 0.0
        values: Sequence[Any] = (done.total, done.weight, small if seen else 0.0, inverse, float(seen))
        return torch.stack([_scalar(value, dtype, device) for value in values])

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        gradients = [local_part(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def _apply(self) -> None:
        if self._scaler is None:
            self._clip()
            self.optimizer.step()
            return
        before = self._scaler.get_scale()
        self._scaler.unscale_(self.optimizer)
        self._clip()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.skipped += self._scaler.get_scale() < before

    def _clip(self) -> None:
        if self._gradient_clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self._gradient_clip)

    def _apply_guarded(self) -> None:
        """In the first steps an out-of-memory error is survived: everything is put back and the step made frugally."""
        snapshot = self._snapshot() if self._guarded and self._steps < GUARDED_STEPS else None
        failure = self._try_to_apply()
        if failure is None:
            return
        # The except block has ended: nothing pins the failed step's tensors any more.
        if snapshot is None:
            raise LostError(
                f"{failure.reason} inside the optimizer's step: weights may be half changed. Go on from the last "
                f"checkpoint with {named('resume')}"
            )
        snapshot.restore()
        self._memory.release()
        for group in self.optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False  # without the temporary copies that updating all weights at once takes
        if self._try_to_apply() is not None:
            *_, more_memory = self._micro.remedies(1)  # smaller inputs or activations would not help here
            helpful = ("an optimizer that keeps less (optimizer.name=sgd)", "a smaller model", more_memory)
            remedies = "\n  - ".join(helpful)
            raise DoesNotFitError(
                f"gradients and optimizer state do not fit ({failure.reason}).\nWhat may help:\n  - {remedies}"
            )

    def _try_to_apply(self) -> Failure | None:
        """Apply the gradients; an out-of-memory error comes back as what it was."""
        failure = None
        try:
            with self._micro.meter.watched():
                self._apply()
        except Exception as error:
            failure = classify(error)
            if failure.kind is not FailureKind.OUT_OF_MEMORY:
                raise
        return failure

    def _snapshot(self) -> StateSnapshot | None:
        objects: Any = ([self._model], [self.optimizer])
        fits = required_bytes(*objects) < HOST_SHARE * available_host_bytes()
        return StateSnapshot.take(*objects) if fits else None


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number on the device, made there: copying one from the host would wait for the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype).reshape(())
    return torch.full((), float(value), dtype=dtype, device=device)
