"""Optimizers of training: made from the settings, the bytes of their state before it exists, and their step.

A window is the samples of one optimizer step over all ranks; a rank runs its share of it in micro-batches.

Before the first optimizer step a micro-batch needs less memory than every later one, since gradients and optimizer
state do not exist yet. Their bytes are reserved while the micro-batch is sized. The state is counted by one step of the
same optimizer on tensors of the same shapes without memory; of a sharded model, this rank's part counts.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError, LostError, RequestError, first_line, nearest_names
from brim.memory.devices import memory_of
from brim.memory.failures import Failure, FailureKind, classify
from brim.memory.snapshot import StateSnapshot, required_bytes
from brim.monitor.host import available_host_bytes
from brim.ranks.gradients import RankGroup, local_part
from brim.settings.caller import named, named_as
from brim.settings.train_settings import TrainSettings
from brim.training.micro_batches import MicroBatches, WindowDone, gradient_square
from brim.workloads.optimizers import optimizer_class

__all__ = [
    "GradientSums", "OptimizerStep", "WindowSums", "absent_bytes", "make_training_optimizer", "optimizer_options",
    "state_bytes_when_made", "tensors_of_state",
]  # fmt: skip

GUARDED_STEPS = 2  # the first step creates the state, the second is the first one with everything in memory
HOST_SHARE = 0.5  # of the free host memory that a snapshot before a guarded step may take
_GUESSED_STATES = 2  # tensors of the weights' size, where the state cannot be counted: what Adam keeps


# ------------------------------------------------------------------------------------------ from the settings


def optimizer_options(settings: TrainSettings) -> dict[str, Any]:
    """The arguments for the optimizer's class; those it does not have are a `RequestError`."""
    name = settings.optimizer.name
    known = _arguments(name)
    given = dict(settings.optimizer.params)
    if settings.hp.weight_decay is not None:
        given["weight_decay"] = settings.hp.weight_decay
    for key in given:
        if key not in known:
            where = "hp.weight_decay" if key == "weight_decay" else f"optimizer.params.{key}"
            raise RequestError(f"{where}: {name} takes {', '.join(known)}{nearest_names(key, known)}")
    if name.lower() == "sgd":
        given.setdefault("momentum", 0.9)
    return {"lr": settings.hp.learning_rate, **{key: _value(value) for key, value in given.items()}}


def make_training_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer on these parameters; arguments that it refuses are a `RequestError`."""
    make: Any = _class_of(name)
    try:
        optimizer: torch.optim.Optimizer = make(list(parameters), **options)
    except Exception as error:  # torch checks its arguments one by one: `betas: ""` is an IndexError
        raise RequestError(f"optimizer.params: {name} does not take {dict(options)}: {error}") from error
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"optimizer.name {name}: it evaluates the loss several times a step, which micro-batches do not allow; "
            "use adamw or sgd"
        )
    _try_step(name, make, optimizer, options)
    return optimizer


def _try_step(name: str, make: Any, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    """Make one step on a weight of four numbers: torch refuses some classes and arguments only there."""
    like = optimizer.param_groups[0]["params"][0]
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
    weight.grad = torch.zeros_like(weight)
    try:
        make([weight], **options).step()
    except Exception as error:
        given = f" with {dict(options)}" if len(options) > 1 else ""
        raise RequestError(
            f"optimizer.name {name}: it cannot make a step{given} ({first_line(error)}); use adamw or sgd, or leave "
            "optimizer.params out"
        ) from error


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    with named_as(optimizer="optimizer.name"):
        return optimizer_class(name)


def _arguments(name: str) -> list[str]:
    return [key for key in inspect.signature(_class_of(name)).parameters if key not in ("params", "lr", "self")]


def _value(value: Any) -> Any:
    """Lists as tuples, and numbers that YAML reads as text, such as 1e-8, as numbers."""
    if isinstance(value, list):
        return tuple(_value(part) for part in value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# ------------------------------------------------------------------------------------------ bytes of the state


def absent_bytes(optimizer: torch.optim.Optimizer, state_bytes: int) -> int:
    """Bytes of gradients that do not exist yet, and of the state, `state_bytes`, before the first step."""
    parameters = _parameters(optimizer)
    gradients = sum(_bytes(parameter) for parameter in parameters if parameter.grad is None)
    has_state = any(optimizer.state.get(parameter) for parameter in parameters)
    return gradients + (0 if has_state else state_bytes)


def state_bytes_when_made(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state after its first step; the optimizer itself is left unchanged."""
    try:
        return _state_bytes_of_twin(optimizer, optimizer.param_groups, device="meta")
    except Exception:  # it reads values, which meta tensors do not have: one parameter at a time on the CPU
        return _state_bytes_shape_by_shape(optimizer)


def _state_bytes_shape_by_shape(optimizer: torch.optim.Optimizer) -> int:
    known: dict[tuple[Any, ...], int] = {}
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kind = (*parameter.shape, parameter.dtype)
            if kind not in known:
                try:
                    known[kind] = _state_bytes_of_twin(optimizer, [{**group, "params": [parameter]}], device="cpu")
                except Exception:
                    known[kind] = _GUESSED_STATES * _bytes(parameter)
            total += known[kind]
    return total


def _state_bytes_of_twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], *, device: str) -> int:
    """Bytes of state after one step of an optimizer of the same kind on parameters of the same shapes."""
    twins: list[dict[str, Any]] = []
    for group in groups:
        options = {name: copy.copy(value) for name, value in group.items() if name != "params"}
        for faster in ("foreach", "fused"):  # they keep the same state
            if faster in options:
                options[faster] = False
        shapes = [
            torch.nn.Parameter(torch.zeros_like(local_part(parameter), device=device)) for parameter in group["params"]
        ]
        twins.append(options | {"params": shapes})
    make: Any = type(optimizer)
    twin: torch.optim.Optimizer = make(twins)
    for parameter in _parameters(twin):
        parameter.grad = torch.zeros_like(parameter)
    twin.step()
    return sum(_bytes(tensor) for tensor in tensors_of_state(twin) if tensor.dim() > 0)


def tensors_of_state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Every tensor of the optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bytes(tensor: torch.Tensor) -> int:
    part = local_part(tensor)
    return part.numel() * part.element_size()


# ------------------------------------------------------------------------------------------ the step


class WindowSums:
    """A window's loss and gradient norms over all ranks, being copied from the device.

    [total loss, weight, Σ|g_small|², Σ1/small, ranks that measured, |g_large|²]. The copy starts at once, and `read`
    waits for it alone; reading the tensor itself would also wait for all work queued on the device since.
    """

    def __init__(self, sums: torch.Tensor, large_square: torch.Tensor | None) -> None:
        last = torch.full_like(sums[:1], math.nan) if large_square is None else large_square.to(sums).reshape(1)
        values = torch.cat([sums, last])
        self._ready: Any = None
        self._host = values
        if values.device.type == "cuda":
            self._host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(values.device))

    def read(self) -> dict[str, float | None]:
        """Wait for the copy; the gradient norms are None where the window was not measured."""
        if self._ready is not None:
            self._ready.synchronize()
        total, weight, small, inverse, measured, large = self._host.tolist()
        noise_measured = not math.isnan(large) and measured > 0 and inverse > 0
        return {
            "loss": total / weight if weight else math.nan,
            "total": total,
            "weight": weight,
            "small": small / measured if noise_measured else None,
            "small_batch": measured / inverse if noise_measured else None,
            "large": large if noise_measured else None,
        }


class GradientSums:
    """The gradients of a window made one: summed over the ranks, and divided by the weight of the whole window.

    Of a `sharded` model the ranks' gradients are summed by torch.
    """

    def __init__(self, micro: MicroBatches, group: RankGroup, *, sharded: bool = False) -> None:
        self.parameters = micro.gradients.trainable()
        self._micro = micro
        self._group = group
        self._sharded = sharded

    def absent(self) -> list[int]:
        """The positions of parameters without a gradient on this rank."""
        return [place for place, parameter in enumerate(self.parameters) if parameter.grad is None]

    def make(self, done: WindowDone, samples: int, *, absent: Iterable[int] = ()) -> torch.Tensor:
        """Sum and weigh in place; `samples` are those that each micro-batch's sum was divided by.

        `absent` are positions of parameters that have no gradient on any rank. Gives the sums of `WindowSums`.
        """
        sums = self._sums(done)
        if self._sharded:
            self._group.add_up(sums)
        else:
            self._group.sum_gradients(self.parameters, sums, absent=absent)
        if not self._micro.gradients.objective.counts_samples:  # but, for example, tokens: their sum is known only now
            self._scale_gradients(samples / sums[1])
        return sums

    def _sums(self, done: WindowDone) -> torch.Tensor:
        device = self._micro.meter.memory.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        small, seen = done.small_square, done.small_square is not None
        inverse = 1.0 / done.small_weight if seen else 0.0
        values: Sequence[Any] = (done.total, done.weight, small if seen else 0.0, inverse, float(seen))
        return torch.stack([_scalar(value, dtype, device) for value in values])

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        gradients = [local_part(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


class OptimizerStep:
    """The optimizer step after a window: gradients summed over the ranks, weighed, measured, clipped and applied.

    `guarded` steps survive an out-of-memory error; of a `sharded` model the ranks' gradients are summed by torch.
    """

    def __init__(
        self,
        micro: MicroBatches,
        optimizer: torch.optim.Optimizer,
        group: RankGroup,
        *,
        scaler: torch.amp.GradScaler | None = None,
        gradient_clip: float | None = None,
        guarded: bool = True,
        sharded: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._gradients = GradientSums(micro, group, sharded=sharded)
        self.parameters = self._gradients.parameters
        self.skipped = 0  # steps that the gradient scaler left out
        self._micro = micro
        self._scaler = scaler
        self._gradient_clip = gradient_clip
        self._guarded = guarded
        self._steps = 0

    def absent(self) -> list[int]:
        """The positions of parameters without a gradient on this rank."""
        return self._gradients.absent()

    def make(self, done: WindowDone, samples: int, *, absent: Iterable[int] = (), measured: bool = False) -> WindowSums:
        """Step on the gradients of a window; `samples` are those of all ranks.

        `absent` are positions of parameters that have no gradient on any rank; `measured` adds the gradient norm.
        """
        sums = self._gradients.make(done, samples, absent=absent)
        large = None
        if measured:
            large = gradient_square(self.parameters)
            if self._scaler is not None:
                large = large / self._scaler.get_scale() ** 2
        self._apply_guarded()
        self._steps += 1
        return WindowSums(sums, large)

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
        """Apply; after an out-of-memory error in the first steps, restore everything and apply with less memory."""
        snapshot = self._snapshot() if self._guarded and self._steps < GUARDED_STEPS else None
        failure = self._try_to_apply()
        if failure is None:
            return
        # The except block has ended: nothing pins the failed step's tensors any more.
        if snapshot is None:
            raise LostError(
                f"{failure.reason} inside the optimizer's step: some weights may be changed and others not. Resume "
                f"from the last checkpoint with {named('resume')}"
            )
        snapshot.restore()
        memory_of(self._micro.meter.memory.device).release()
        for group in self.optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False  # one weight at a time, without temporary copies of all of them
        if self._try_to_apply() is not None:
            *_, more_memory = self._micro.remedies(1)  # smaller inputs or activations would not help here
            helpful = ("an optimizer that keeps less (optimizer.name=sgd)", "a smaller model", more_memory)
            remedies = "\n  - ".join(helpful)
            raise DoesNotFitError(
                f"gradients and optimizer state do not fit ({failure.reason}).\nWhat may help:\n  - {remedies}"
            )

    def _try_to_apply(self) -> Failure | None:
        """Apply the gradients; an out-of-memory error is returned instead of raised."""
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
        objects: Any = ([self._micro.gradients.model], [self.optimizer])
        fits = required_bytes(*objects) < HOST_SHARE * available_host_bytes()
        return StateSnapshot.take(*objects) if fits else None


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor, created on the device: copying it from the host would wait for the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype).reshape(())
    return torch.full((), float(value), dtype=dtype, device=device)
