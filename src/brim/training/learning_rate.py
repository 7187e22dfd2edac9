"""The learning rate of every step: a scheduler of `torch.optim.lr_scheduler`, a warm-up, and a factor for the batch.

The scheduler runs on a stand-in optimizer with a single parameter. Its rate is multiplied by warm-up and factor, so
that they work with any scheduler. A checkpoint stores only the scheduler's calls; a resumed run repeats them.

The factor follows the effective batch: for a batch κ times as large, SGD takes κ times the learning rate, Adam and its
relatives √κ times. For Adam the same argument gives β = 1 − κ(1 − β) and ε/√κ (Malladi et al. 2022).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from brim.errors import RequestError, nearest_names, plural

__all__ = [
    "LearningRate", "ScheduleRequest", "adjusted_betas", "adjusted_eps", "chosen_rule", "lr_factor", "scheduler_class",
]  # fmt: skip

RAMP_STEPS = 20  # over which the rate moves to a changed factor

_ALIASES = {
    "cosine": "cosineannealinglr",
    "step": "steplr",
    "multistep": "multisteplr",
    "exponential": "exponentiallr",
    "linear": "linearlr",
    "constant": "constantlr",
    "polynomial": "polynomiallr",
    "onecycle": "onecyclelr",
    "cyclic": "cycliclr",
    "plateau": "reducelronplateau",
}
_NOT_BY_NAME = ("lrscheduler", "chainedscheduler", "sequentiallr", "lambdalr", "multiplicativelr")
_BY_STEP = ("onecyclelr", "cycliclr")  # called after every step; the others after every epoch
_LINEAR = ("sgd", "asgd")  # optimizers whose learning rate grows as the batch does


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The scheduler that the settings name, and the length of the run."""

    name: str = "none"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float
    epochs: int
    total_steps: int
    warmup_steps: int = 0
    steps_may_change: bool = False  # the effective batch may grow, which leaves fewer steps


def scheduler_class(name: str) -> type[lr_scheduler.LRScheduler] | None:
    """The scheduler class for a name in any case, with or without `LR` at its end; None for `none`."""
    plain = name.lower().replace("_", "")
    if plain == "none":
        return None
    known = {
        key.lower(): member
        for key, member in vars(lr_scheduler).items()
        if isinstance(member, type)
        and issubclass(member, lr_scheduler.LRScheduler)
        and not key.startswith("_")
        and key.lower() not in _NOT_BY_NAME
    }
    found = known.get(_ALIASES.get(plain, plain)) or known.get(f"{plain}lr")
    if found is None:
        names = ["none", *_ALIASES, *known]
        raise RequestError(
            f"scheduler.name {name}: torch {torch.__version__} has {', '.join(sorted(known))}"
            f"{nearest_names(plain, names)}"
        )
    return found


class LearningRate:
    """Sets the learning rate of an optimizer, step by step.

    `make_optimizer` makes the stand-in that the scheduler runs on: the same kind of optimizer, on other parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        request: ScheduleRequest,
        *,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.request = request
        self.optimizer = optimizer
        self.factor = 1.0
        self._ramp_from, self._ramp_step = 1.0, -RAMP_STEPS
        self._losses: list[float | None] = []  # one for each call of the scheduler: its loss where it takes one
        self._make_optimizer = make_optimizer
        self._stand_in = self._new_stand_in()
        self._scheduler = self._make_scheduler()
        self._initial = {key: self._stand_in.param_groups[0].get(key) for key in ("momentum", "betas")}

    def _make_scheduler(self) -> Any:
        kind = scheduler_class(self.request.name)
        if kind is None:
            return None
        name = kind.__name__.lower()
        if name in _BY_STEP and self.request.steps_may_change:
            raise RequestError(
                f"scheduler.name {self.request.name}: it counts steps, and the number of steps is not known while the "
                "effective batch grows; use cosine, or a fixed hp.effective_batch"
            )
        known = list(inspect.signature(kind).parameters)[1:]
        units = self.request.total_steps if name in _BY_STEP else self.request.epochs
        defaults = {
            "T_max": units,
            "total_iters": units,
            "total_steps": units,
            "max_lr": self.request.learning_rate,
            "base_lr": self.request.learning_rate / 10,
            "step_size": max(units // 3, 1),
            "gamma": 0.95 if name == "exponentiallr" else 0.1,
            "milestones": [units // 2, units * 3 // 4],
            "T_0": max(units // 4, 1),
        }
        for key in self.request.params:
            if key not in known:
                raise RequestError(
                    f"scheduler.params.{key}: {kind.__name__} takes {', '.join(known)}{nearest_names(key, known)}"
                )
        wanted = {key: value for key, value in defaults.items() if key in known} | dict(self.request.params)
        make: Any = kind
        try:
            _step(make(self._new_stand_in(), **wanted), 1.0)  # some arguments are checked in the first step only
            scheduler = make(self._stand_in, **wanted)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(f"scheduler.params: {kind.__name__} does not take {wanted}: {error}") from error
        planned = getattr(scheduler, "total_steps", self.request.total_steps)
        if planned < self.request.total_steps:
            raise RequestError(
                f"scheduler.params: {kind.__name__} ends after {plural(planned, 'step')}, and the run makes "
                f"{self.request.total_steps}; leave total_steps out, or give at least as many"
            )
        return scheduler

    def _new_stand_in(self) -> torch.optim.Optimizer:
        return self._make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))])

    @property
    def by_step(self) -> bool:
        """Whether the scheduler is called after every step instead of every epoch."""
        return type(self._scheduler).__name__.lower() in _BY_STEP

    def current(self, step: int) -> float:
        """The learning rate of a step; the first is step 0."""
        scheduled = self.request.learning_rate
        if self._scheduler is not None:
            scheduled = float(self._stand_in.param_groups[0]["lr"])
        warmup = self.request.warmup_steps
        rising = (step + 1) / warmup if step < warmup else 1.0
        ramp = min((step - self._ramp_step + 1) / RAMP_STEPS, 1.0)
        return scheduled * rising * (self._ramp_from + (self.factor - self._ramp_from) * ramp)

    def apply(self, step: int) -> float:
        """Set the optimizer's learning rate for a step, and the momentum or betas where the scheduler changes them."""
        rate = self.current(step)
        stand_in = self._stand_in.param_groups[0]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            for key, initial in self._initial.items():
                if stand_in.get(key) != initial:
                    group[key] = stand_in[key]
        return rate

    def step_done(self) -> None:
        """To be called after every optimizer step."""
        if self.by_step and len(self._losses) < self.request.total_steps:
            self._call(None)

    def epoch_done(self, loss: float) -> None:
        """To be called after every epoch; `loss` is what ReduceLROnPlateau goes by."""
        if self._scheduler is not None and not self.by_step:
            self._call(loss if isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau) else None)

    def rescale(self, factor: float, *, step: int) -> None:
        """Multiply the rate by `factor` from now on, reached over `RAMP_STEPS` steps from this one."""
        ramp = min(max((step - self._ramp_step) / RAMP_STEPS, 0.0), 1.0)
        self._ramp_from += (self.factor - self._ramp_from) * ramp
        self.factor, self._ramp_step = factor, step

    def start_at(self, factor: float) -> None:
        """The factor of a run that has made no step yet, without a ramp."""
        self.factor = self._ramp_from = factor

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "calls": len(self._losses) if all(loss is None for loss in self._losses) else self._losses,
            "factor": self.factor,
            "ramp_from": self._ramp_from,
            "ramp_step": self._ramp_step,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Repeat the calls of the scheduler that `to_json` counted."""
        calls = data["calls"]
        for loss in [None] * calls if isinstance(calls, int) else calls:
            self._call(loss)
        self.factor, self._ramp_from, self._ramp_step = data["factor"], data["ramp_from"], data["ramp_step"]

    def _call(self, loss: float | None) -> None:
        self._losses.append(loss)
        _step(self._scheduler, loss)


def _step(scheduler: Any, loss: float | None) -> None:
    scheduler.optimizer.step()  # changes nothing: torch warns where a scheduler is called before its optimizer
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        assert loss is not None
        scheduler.step(loss)
    else:
        scheduler.step()


def chosen_rule(rule: str, optimizer: str) -> str:
    """How the rate follows the batch: `none`, `sqrt` or `linear`; `auto` depends on the optimizer."""
    if rule != "auto":
        return rule
    return "linear" if optimizer.lower() in _LINEAR else "sqrt"


def lr_factor(rule: str, growth: float, optimizer: str) -> float:
    """The factor on the learning rate where the batch is `growth` times the one that the rate was chosen for."""
    rule = chosen_rule(rule, optimizer)
    if rule == "none":
        return 1.0
    return growth if rule == "linear" else math.sqrt(growth)


def adjusted_betas(betas: Sequence[float], growth: float) -> tuple[float, ...]:
    """Adam's betas so that its averages span as many samples as before; 0 where a batch is larger than that."""
    return tuple(max(1 - growth * (1 - beta), 0.0) for beta in betas)


def adjusted_eps(eps: float, growth: float) -> float:
    """Adam's eps, smaller as a larger batch makes gradients less noisy."""
    return eps / math.sqrt(growth)
