"""The effective batch of a run: how it is chosen, how it and the learning rate follow the gradient noise scale.

Also the sizes that an earlier run found, and the plan that this one leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.records import Plan, Unit
from brim.settings.caller import given
from brim.settings.train_settings import TrainSettings
from brim.sizing.micro_batches import MicroBatchSizer
from brim.sizing.plans import PlanFile
from brim.storage.files import read_json
from brim.training.learning_rate import LearningRate, ScheduleRequest, adjusted_betas, adjusted_eps, lr_factor
from brim.training.optimizers import make_training_optimizer

__all__ = [
    "DEFAULT_EFFECTIVE_BATCH",
    "AdaptiveBatch",
    "BatchGrowth",
    "EarlierSizes",
    "EffectiveBatch",
    "NoiseScale",
    "choose_effective_batch",
    "make_adaptive_batch",
    "training_plan",
]

DEFAULT_EFFECTIVE_BATCH = 128  # where neither batch_size nor effective_batch says anything
DECAY = 0.95  # of the running means of the noise scale, with each measurement
MIN_MEASUREMENTS = 8  # before it has a value
FEWEST_STEPS = 8  # an epoch, for that default: a batch that is most of the data learns little from it


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """The effective batch a run starts with, the batch its learning rate belongs to, and remarks about them."""

    batch: int
    base: int
    grows: bool
    rule: str = "none"  # how the learning rate follows a batch that is not the base
    notes: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share; the base counts where the learning rate follows from it."""
        return {"batch": self.batch, "grows": self.grows, "base": None if self.rule == "none" else self.base}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierSizes:
    """The sizes of an earlier run, which `plan` names."""

    effective_batch: int
    micro_cap: int
    unit: Unit
    eval_batch: int | None
    learning_rate: float | None = None

    @classmethod
    def read(cls, folder: str) -> EarlierSizes:
        """From a training run's run.json."""
        record: Any = read_json(Path(folder) / "run.json")
        if not isinstance(record, dict) or record.get("kind") != "train" or not record.get("plan"):
            raise RequestError(f"{given('plan', folder)}: its run.json is not that of a training run with a plan")
        summary, plan = record["summary"], record["plan"]
        if summary.get("effective_batch_size") is None:
            raise RequestError(f"{given('plan', folder)}: that run recorded no effective batch; choose another run")
        return cls(
            effective_batch=int(summary["effective_batch_size"]),
            micro_cap=int(plan["size"]),
            unit=plan["unit"],
            eval_batch=summary.get("eval_batch_size"),
        )


def choose_effective_batch(
    settings: TrainSettings, *, samples: int, ranks: int, earlier: EarlierSizes | None = None
) -> EffectiveBatch:
    """How many samples an optimizer step has; never more than there are."""
    asked, micro = settings.hp.effective_batch, settings.hp.batch_size
    notes: list[str] = []
    if isinstance(asked, int):
        batch = asked
    elif earlier is not None:
        batch = earlier.effective_batch
    elif isinstance(micro, int):
        batch = micro * ranks
    else:
        batch = min(DEFAULT_EFFECTIVE_BATCH, max(samples // FEWEST_STEPS, 1))
        if asked is None:
            notes.append(f"no batch was named: the effective batch is {batch} (hp.effective_batch)")
    if batch > samples:
        notes.append(
            f"an effective batch of {batch} is more than the {plural(samples, 'training sample')}: it is {samples}"
        )
        batch = samples
    base = settings.hp.base_batch
    if base is None:
        base = micro * ranks if isinstance(micro, int) else batch
    grows = asked == "auto"
    rule = settings.training.lr_scale or ("auto" if grows else "none")
    return EffectiveBatch(batch=batch, base=max(base, 1), grows=grows, rule=rule, notes=tuple(notes))


def training_plan(
    file: PlanFile, sizes: MicroBatchSizer, *, peak_bytes: int | None, cached: bool, confirmed: bool, share: int
) -> Plan:
    """The sizes that a run settled at, and the probes that support them."""
    if cached:
        reason = "a plan of an earlier run"
    elif sizes.request.ceiling is not None:
        reason = "the size asked for"
    else:
        reason = "found on the run's own micro-batches, raised while the rate rose"
    if confirmed:
        reason += "; confirmed after the second optimizer step"
    used = sizes.sizes_used()
    largest = max((probe.batch_size for probe in sizes.probes if probe.fits), default=1)
    size = min(sizes.live.kept, sizes.agreed, math.inf if sizes.request.unit == "tokens" else share)
    return file.plan(
        sizes.live,
        unit="samples" if sizes.by_count else sizes.request.unit,
        size=int(size),
        largest=max(largest, used.largest if used else 1),
        reason=reason,
        cached=cached,
        peak_bytes=peak_bytes,
        probes=sizes.probes,
    )


PATIENCE = 16  # noise measurements between two steps up: the means have to follow


@dataclasses.dataclass(kw_only=True)
class NoiseScale:
    """The gradient noise scale: the batch size beyond which more samples in a step help less than they cost.

    A gradient over B samples has E|g|² = |G|² + S/B, where G is the true gradient and S the trace of the covariance of
    the gradients of single samples. |g|² at two batch sizes of the same step gives |G|² and S. At a batch of S/|G|²,
    noise and signal are equally large (McCandlish et al. 2018). A single pair is very noisy, so |G|² and S are averaged
    over steps before the division.
    """

    signal: float = 0.0  # decaying sum of |G|²
    noise: float = 0.0  # decaying sum of S
    total: float = 0.0  # decaying sum of ones: the sums are divided by it
    measurements: int = 0

    def observe(self, *, small: float, small_batch: float, large: float, large_batch: float) -> None:
        """Add a measurement: |g|² of the mean gradient over a small batch and over a large one that contains it."""
        if not 0 < small_batch < large_batch:
            return
        signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        noise = (small - large) / (1 / small_batch - 1 / large_batch)
        self.signal = DECAY * self.signal + signal
        self.noise = DECAY * self.noise + noise
        self.total = DECAY * self.total + 1.0
        self.measurements += 1

    @property
    def value(self) -> float | None:
        """S/|G|² in samples; None with too few measurements, or where |G|² is too noisy to be positive."""
        if self.measurements < MIN_MEASUREMENTS or self.signal <= 0:
            return None
        return max(self.noise, 0.0) / self.signal

    def useful_batch(self) -> int | None:
        """The noise scale as a batch size: beyond it, a larger batch gains less than half of what it costs."""
        value = self.value
        return None if value is None else max(round(value), 1)

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dataclasses.asdict(self)

    def report(self) -> dict[str, Any] | None:
        """The entry in run.json; None without measurements."""
        if self.measurements == 0:
            return None
        return {
            "noise_scale": self.value,
            "useful_batch": self.useful_batch(),
            "measurements": self.measurements,
            "gradient_square": self.signal / self.total,
            "gradient_variance": self.noise / self.total,
        }


@dataclasses.dataclass(kw_only=True)
class BatchGrowth:
    """The effective batch, and when it may double.

    It never exceeds the data, nor `ceiling`; nor the noise scale, unless `beyond_noise`, which doubles as often as
    patience allows.
    """

    batch: int
    ceiling: int
    beyond_noise: bool = False
    waited: int = 0  # measurements since the last change

    def measured(self, noise: NoiseScale) -> int | None:
        """After a measurement: the new effective batch, or None while it stays."""
        self.waited += 1
        if self.waited < PATIENCE or self.batch >= self.ceiling:
            return None
        larger = min(2 * self.batch, self.ceiling)
        useful = noise.useful_batch()
        if not self.beyond_noise and (useful is None or useful < larger):
            return None
        self.batch, self.waited = larger, 0
        return larger

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"batch": self.batch, "waited": self.waited}


MEASURE_EVERY = 4  # steps between two measurements of the noise
WARMUP_SHARE = 0.05  # of all steps, where the learning rate was scaled up and no warm-up was asked for
DELAY = 2  # steps between a measurement and what follows from it: its figures are read one step late


class AdaptiveBatch:
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

    def rate_facts(self) -> dict[str, Any]:
        """How the learning rate came about, for the record."""
        asked = self.rate.request
        return {
            "base": asked.learning_rate,
            "base_batch": self.base_batch,
            "rule": self.rule,
            "factor": self.rate.factor,
            "warmup_steps": asked.warmup_steps,
        }

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
        """Continue where `to_json` was called; the optimizer's own groups come with its state."""
        self._effective_batch = data["effective_batch"]
        self._planned = None if data["planned"] is None else (data["planned"][0], data["planned"][1])
        self.noise = NoiseScale(**data["noise"])
        if self.growth is not None and data["growth"] is not None:
            self.growth.batch, self.growth.waited = data["growth"]["batch"], data["growth"]["waited"]
        self.rate.restore(data["rate"])


def make_adaptive_batch(
    settings: TrainSettings,
    effective: EffectiveBatch,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    *,
    samples: int,
    notes: list[str],
) -> AdaptiveBatch:
    """The learning rate over the run and what changes it; remarks for the user are added to `notes`."""
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
    return AdaptiveBatch(
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
