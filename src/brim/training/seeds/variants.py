"""The runs of a training of several seeds and learning rates: their settings, folders, and the rate of every step.

A stack of runs needs the learning rates before it starts, so schedules that depend on a run's own loss have no table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import TrainSettings
from brim.training.effective_batch import EffectiveBatch, make_adaptive_batch
from brim.training.fast_path.task import RunSpec
from brim.training.learning_rate import scheduler_class
from brim.training.optimizers import make_training_optimizer, optimizer_options

__all__ = ["RateTable", "Variant", "epochs_run", "make_rate_table", "variants_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One seed at one learning rate."""

    seed: int
    learning_rate: float
    name: str  # what people read, and the folder's name inside the training's

    @property
    def spec(self) -> RunSpec:
        """As the fast path knows it."""
        return RunSpec(seed=self.seed, lr=self.learning_rate)

    def settings(self, settings: TrainSettings) -> TrainSettings:
        """The settings of this run alone: those of `brim train CONFIG hp.seed=N`."""
        hp = dataclasses.replace(settings.hp, seed=self.seed, learning_rate=self.learning_rate)
        return dataclasses.replace(settings, hp=hp)

    def request(self, request: TrainRequest, *, resume: bool = False) -> TrainRequest:
        """The request of this run alone."""
        return dataclasses.replace(
            request, settings=self.settings(request.settings), seeds=(), learning_rates=(), fast_path="auto",
            resume=resume,
        )  # fmt: skip


def variants_of(request: TrainRequest) -> tuple[Variant, ...]:
    """Every seed at every learning rate; of one rate only the seed is in the name."""
    hp = request.settings.hp
    rates, seeds = request.learning_rates or (hp.learning_rate,), request.seeds or (hp.seed,)
    several = len(request.learning_rates) > 1
    return tuple(
        Variant(seed=seed, learning_rate=rate, name=f"seed-{seed}-lr-{rate:g}" if several else f"seed-{seed}")
        for rate in rates
        for seed in seeds
    )


_SET_BY_STEPS = ("params", "lr", "initial_lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateTable:
    """The rates of a run, and the optimizer's arguments beside them."""

    rates: tuple[float, ...]  # by the optimizer step, from 0
    options: Mapping[str, Any]  # of the optimizer, without lr
    facts: Mapping[str, Any]  # for the record: base, base batch, rule, factor, warm-up
    notes: tuple[str, ...] = ()

    def factors(self, learning_rate: float) -> tuple[float, ...]:
        """The rates over that of the run, rounded so that runs of the same shape are known as such."""
        return tuple(float(f"{rate / learning_rate:.15g}") for rate in self.rates)


def epochs_run(settings: TrainSettings, *, steps_per_epoch: int) -> int | None:
    """How many whole epochs a run has; None where `hp.max_steps` ends it inside one."""
    epochs, most = settings.hp.epochs, settings.hp.max_steps
    if most is None or most >= epochs * steps_per_epoch:
        return epochs
    return most // steps_per_epoch if most % steps_per_epoch == 0 else None


def make_rate_table(
    settings: TrainSettings, effective: EffectiveBatch, *, samples: int, epochs: int
) -> RateTable | str:
    """Drive the run's own schedule over its steps; or why that cannot be done beforehand."""
    if scheduler_class(settings.scheduler.name) is lr_scheduler.ReduceLROnPlateau:
        return "scheduler plateau follows each seed's own loss"
    options = optimizer_options(settings)
    optimizer = make_training_optimizer(settings.optimizer.name, [nn.Parameter(torch.zeros(1, 1))], options)
    notes: list[str] = []
    adaptive = make_adaptive_batch(settings, effective, optimizer, options, samples=samples, notes=notes)
    group, rate = optimizer.param_groups[0], adaptive.rate
    started = {name: group[name] for name in group if name not in _SET_BY_STEPS}
    rates: list[float] = []
    for _ in range(epochs):
        for _ in range(math.ceil(samples / effective.batch)):
            rates.append(rate.apply(len(rates)))
            if any(group[name] != value for name, value in started.items()):
                return f"scheduler {settings.scheduler.name} changes more than the learning rate"
            rate.step_done()
        rate.epoch_done(0.0)
    given = {name: value for name, value in options.items() if name != "lr"}
    given |= {name: started[name] for name in ("betas", "eps") if name in started and name in group}
    return RateTable(rates=tuple(rates), options=given, facts=adaptive.rate_facts(), notes=tuple(notes))
