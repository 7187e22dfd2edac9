"""What follows the gradients as a run goes: the learning rate, the noise scale, and a batch that may grow with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.settings.train_settings import TrainSettings
from brim.sizing.micro_batches import MicroBatchSizer
from brim.training.effective_batch import Effective
from brim.training.growth import BatchGrowth
from brim.training.learning_rate import LearningRate, ScheduleRequest, adjusted_betas, adjusted_eps, lr_factor
from brim.training.noise_scale import NoiseScale
from brim.training.optimizers import make_training_optimizer

__all__ = ["Adaptive", "make_adaptive"]

MEASURE_EVERY = 4  # steps between two looks at the noise
WARMUP_SHARE = 0.05  # of all steps, where the learning rate was scaled up and no warm-up was asked for
DELAY = 2  # steps between a measurement and what follows from it: its figures are read one step late


class Adaptive:
    """Decides the effective batch and the learning rate of every step; the same on every rank.

    `base_batch` is the batch that the learning rate was chosen for, `rule` how the rate follows another one.
    """

    def __init__(
        self,
        *,
        effective_batch: int,
        base_batch: int,
        rate: LearningRate,
        rule: str,
        optimizer_name: str,
        growth: BatchGrowth | None = None,
        scale_betas: bool = False,
    ) -> None:
        self.rate = rate
        self.noise = NoiseScale()
        self.growth = growth
        self.base_batch = base_batch
        self.rule = rule
        self._effective_batch = effective_batch
        self._optimizer_name = optimizer_name
        self._scale_betas = scale_betas
        self._planned: tuple[int, int] | None = None  # (step, effective batch) decided on but not yet in force
        first = rate.optimizer.param_groups[0]
        self._betas, self._eps = first.get("betas"), first.get("eps")
        rate.start_at(self._factor(effective_batch))
        self._adjust_optimizer(effective_batch)

    @property
    def effective_batch(self) -> int:
        """Samples of the next optimizer step over all ranks."""
        return self._effective_batch

    def measures(self, step: int, sizes: MicroBatchSizer, share: int, ranks: int) -> bool:
        """Whether this step's noise is measured: where it costs nothing, or where the batch is to grow."""
        if step % MEASURE_EVERY:
            return False
        parts = ranks > 1 or (sizes.by_count and sizes.next_size() < share)
        return parts or (self.growth is not None and share >= 2 * sizes.request.smallest)

    def observe(self, step: int, samples: int, figures: Mapping[str, float | None]) -> None:
        """A step's figures are known."""
        small, small_batch, large = figures["small"], figures["small_batch"], figures["large"]
        if small is None or small_batch is None or large is None:
            return
        self.noise.observe(
            small=small, small_batch=small_batch, large=large, large_batch=figures["weight"] or float(samples)
        )
        if self.growth is not None and self._planned is None:
            larger = self.growth.measured(self.noise)
            if larger is not None:
                self._planned = (step + DELAY, larger)

    def take_effect(self, step: int) -> dict[str, Any] | None:
        """After a step: the change that comes into force with the next one, if there is one."""
        if self._planned is None or step < self._planned[0]:
            return None
        _, larger = self._planned
        self._planned, self._effective_batch = None, larger
        factor = self._factor(larger)
        self.rate.rescale(factor, step=step)
        self._adjust_optimizer(larger)
        useful = self.noise.useful_batch()
        return {
            "effective_batch": larger,
            "learning_rate": self.rate.request.learning_rate * factor,
            "noise_scale": useful,
        }

    def _factor(self, batch: int) -> float:
        return lr_factor(self.rule, batch / self.base_batch, self._optimizer_name)

    def _adjust_optimizer(self, batch: int) -> None:
        """Adam's betas and eps for this batch, where that was asked for."""
        if not self._scale_betas or self.rule == "none" or self._betas is None:
            return
        growth = batch / self.base_batch
        for group in self.rate.optimizer.param_groups:
            group["betas"] = adjusted_betas(self._betas, growth)
            if self._eps is not None:
                group["eps"] = adjusted_eps(self._eps, growth)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "effective_batch": self._effective_batch,
            "planned": self._planned,
            "noise": self.noise.to_json(),
            "growth": None if self.growth is None else self.growth.to_json(),
            "rate": self.rate.to_json(),
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on where `to_json` was called; the optimizer's own groups come with its state."""
        self._effective_batch = data["effective_batch"]
        self._planned = None if data["planned"] is None else (data["planned"][0], data["planned"][1])
        self.noise = NoiseScale(**data["noise"])
        if self.growth is not None and data["growth"] is not None:
            self.growth.batch, self.growth.waited = data["growth"]["batch"], data["growth"]["waited"]
        self.rate.restore(data["rate"])


def make_adaptive(
    settings: TrainSettings,
    effective: Effective,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    *,
    samples: int,
    notes: list[str],
) -> Adaptive:
    """The learning rate over the run and what moves it, as the settings say; what to tell the user goes to notes."""
    hp, training, name = settings.hp, settings.training, settings.optimizer.name
    steps_per_epoch = math.ceil(samples / effective.batch)
    total = min(steps_per_epoch * hp.epochs, hp.max_steps or steps_per_epoch * hp.epochs)
    warmup = _warmup_steps(settings, steps_per_epoch)
    if warmup is None:
        warmup = 0
        if effective.rule != "none" and effective.batch > effective.base:
            warmup = max(min(round(WARMUP_SHARE * total), 500), min(10, total // 2))
            notes.append(
                f"the learning rate was scaled up: it warms up over {plural(warmup, 'step')} (scheduler.warmup_steps)"
            )
    rate = LearningRate(
        optimizer,
        ScheduleRequest(
            name=settings.scheduler.name,
            params=settings.scheduler.params,
            learning_rate=hp.learning_rate,
            epochs=hp.epochs,
            total_steps=total,
            warmup_steps=warmup,
            steps_may_change=effective.grows,
        ),
        make_optimizer=lambda parameters: make_training_optimizer(name, parameters, options),
    )
    growth = None
    if effective.grows:
        ceiling = min(samples, training.max_effective_batch or samples)
        growth = BatchGrowth(batch=effective.batch, ceiling=ceiling, beyond_noise=training.beyond_noise)
    return Adaptive(
        effective_batch=effective.batch,
        base_batch=effective.base,
        rate=rate,
        rule=effective.rule,
        optimizer_name=name,
        growth=growth,
        scale_betas=training.scale_betas,
    )


def _warmup_steps(settings: TrainSettings, steps_per_epoch: int) -> int | None:
    """As many as were asked for, in steps or in epochs; None where nothing was said."""
    scheduler = settings.scheduler
    if scheduler.warmup_epochs is not None:
        steps = scheduler.warmup_epochs * steps_per_epoch
        if not math.isfinite(steps):
            raise RequestError(f"scheduler.warmup_epochs {scheduler.warmup_epochs:g}: give fewer epochs")
        return round(steps)
    return scheduler.warmup_steps
