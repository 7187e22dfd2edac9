"""The learning rate over a run: a scheduler of `torch.optim.lr_scheduler` by name, a warm-up before it, a factor on it.

The scheduler drives a shadow of the optimizer that holds one number, and what it says is multiplied by warm-up and
factor: so neither disturbs the other, whatever formula the scheduler has. Nothing of it is stored in a checkpoint but
how often it was called, and with which figures: called again as often, it stands where it stood.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from brim.errors import RequestError, nearest_names, plural

__all__ = ["LearningRate", "ScheduleRequest", "scheduler_class"]

RAMP_STEPS = 20  # over which a changed factor comes into force

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
_BY_STEP = ("onecyclelr", "cycliclr")  # the others count epochs, as their documentation has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """What the file asks for, and how long the run is."""

    name: str = "none"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float
    epochs: int
    total_steps: int
    warmup_steps: int = 0
    steps_may_change: bool = False  # the effective batch grows, so that the number of steps is not known


def scheduler_class(name: str) -> type[lr_scheduler.LRScheduler] | None:
    """The class of that name in any case, with or without its ending; None for `none`."""
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
    """Sets the learning rate of an optimizer, step by step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        request: ScheduleRequest,
        *,
        make_shadow: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.request = request
        self.optimizer = optimizer
        self.factor = 1.0
        self._ramp_from, self._ramp_step = 1.0, -RAMP_STEPS
        self._calls: list[float | None] = []  # the figure each call of the scheduler was given
        self._make_shadow = make_shadow
        self._shadow = self._new_shadow()
        self._scheduler = self._make_scheduler()
        self._started = {key: self._shadow.param_groups[0].get(key) for key in ("momentum", "betas")}

    def _make_scheduler(self) -> Any:
        kind = scheduler_class(self.request.name)
        if kind is None:
            return None
        name = kind.__name__.lower()
        if name in _BY_STEP and self.request.steps_may_change:
            raise RequestError(
                f"scheduler.name {self.request.name}: it counts steps, and how many there will be is not known while "
                "the effective batch grows; use cosine, or a fixed hp.effective_batch"
            )
        takes = list(inspect.signature(kind).parameters)[1:]
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
            if key not in takes:
                raise RequestError(
                    f"scheduler.params.{key}: {kind.__name__} takes {', '.join(takes)}{nearest_names(key, takes)}"
                )
        wanted = {key: value for key, value in defaults.items() if key in takes} | dict(self.request.params)
        make: Any = kind
        try:
            _step(make(self._new_shadow(), **wanted), 1.0)  # some arguments are looked at only now
            scheduler = make(self._shadow, **wanted)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(f"scheduler.params: {kind.__name__} does not take {wanted}: {error}") from error
        planned = getattr(scheduler, "total_steps", self.request.total_steps)
        if planned < self.request.total_steps:
            raise RequestError(
                f"scheduler.params: {kind.__name__} ends after {plural(planned, 'step')}, and the run makes "
                f"{self.request.total_steps}; leave total_steps out, or give as many"
            )
        return scheduler

    def _new_shadow(self) -> torch.optim.Optimizer:
        return self._make_shadow([torch.nn.Parameter(torch.zeros(1, 1))])

    @property
    def by_step(self) -> bool:
        """Whether the scheduler counts steps."""
        return type(self._scheduler).__name__.lower() in _BY_STEP

    def current(self, step: int) -> float:
        """The learning rate of the step of that number, from 0."""
        planned = (
            float(self._shadow.param_groups[0]["lr"]) if self._scheduler is not None else self.request.learning_rate
        )
        warmup = self.request.warmup_steps
        rising = (step + 1) / warmup if step < warmup else 1.0
        ramp = min((step - self._ramp_step + 1) / RAMP_STEPS, 1.0)
        return planned * rising * (self._ramp_from + (self.factor - self._ramp_from) * ramp)

    def apply(self, step: int) -> float:
        """Put it into the optimizer, and with it what the scheduler changes beside (momentum, in one cycle)."""
        rate = self.current(step)
        shadow = self._shadow.param_groups[0]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            for key, started in self._started.items():
                if shadow.get(key) != started:
                    group[key] = shadow[key]
        return rate

    def step_done(self) -> None:
        """An optimizer step was made."""
        if self.by_step and len(self._calls) < self.request.total_steps:
            self._call(None)

    def epoch_done(self, loss: float) -> None:
        """An epoch has ended; `loss` is what a plateau is judged by."""
        if self._scheduler is not None and not self.by_step:
            self._call(loss if isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau) else None)

    def rescale(self, factor: float, *, step: int) -> None:
        """From this step on the rate moves to `factor` times what it would be, over some steps."""
        ramp = min(max((step - self._ramp_step) / RAMP_STEPS, 0.0), 1.0)
        self._ramp_from += (self.factor - self._ramp_from) * ramp
        self.factor, self._ramp_step = factor, step

    def start_at(self, factor: float) -> None:
        """The factor from the first step on, before any was made."""
        self.factor = self._ramp_from = factor

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "calls": len(self._calls) if all(figure is None for figure in self._calls) else self._calls,
            "factor": self.factor,
            "ramp_from": self._ramp_from,
            "ramp_step": self._ramp_step,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Call the scheduler as often as it had been called."""
        calls = data["calls"]
        for figure in [None] * calls if isinstance(calls, int) else calls:
            self._call(figure)
        self.factor, self._ramp_from, self._ramp_step = data["factor"], data["ramp_from"], data["ramp_step"]

    def _call(self, figure: float | None) -> None:
        self._calls.append(figure)
        _step(self._scheduler, figure)


def _step(scheduler: Any, figure: float | None) -> None:
    scheduler.optimizer.step()  # it has nothing to do: the scheduler wants to be called after it
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        assert figure is not None
        scheduler.step(figure)
    else:
        scheduler.step()
