"""transformers' `Trainer` and TRL's on top of it: a forecast, sizes before `train()`, and survival during it.

    fit_to_memory(trainer)      # before trainer.train(): per-device batch and accumulation, the effective batch stays
    forecast(trainer, gpu="rtx 4090")

The only file that imports transformers for this. PEFT's adapters and TRL's losses need nothing of their own: what runs
is the trainer's own `training_step`, on its own data and collator.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.integrations.transformers_batches import BatchLayout
from brim.integrations.transformers_guard import TrainerGuard
from brim.integrations.transformers_samples import CostliestSamples
from brim.integrations.transformers_workload import (
    EvaluationWorkload,
    TrainingWorkload,
    optimizer_state_bytes,
    prepared,
)
from brim.memory.devices import memory_of
from brim.planning.forecast import ForecastResult
from brim.planning.forecast import forecast as forecast_workload
from brim.records import Objective, Plan
from brim.searching.find import find_plan
from brim.settings.caller import given
from brim.settings.find_settings import DEFAULT_MAX_SIZE, OwnStep, SearchSettings
from brim.settings.forecast_settings import ForecastSettings
from brim.settings.shared import checked_batch_size
from brim.settings.sizes import parse_bytes
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer

__all__ = ["TrainerFit", "fit_to_memory", "forecast"]

_log = logging.getLogger("brim.integrations")

_OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
_PAIRED = ("DPOTrainer", "RewardTrainer")
_OVER_THE_BATCH = ("aot", "aot_unpaired")  # losses of DPO that sort a batch: they are not a mean over pairs
_FIT = "_brim_fit"


def forecast(
    trainer: Any,
    *,
    gpu: str | Sequence[str] = (),
    memory: int | str | None = None,
    batch_size: int | None = None,
    margin: float | None = None,
    max_batch_size: int = DEFAULT_MAX_SIZE,
    samples: Sequence[Any] | None = None,
    by_module: int | None = None,
) -> ForecastResult:
    """The memory that a trainer's own training step would take on a card, before any GPU is touched.

    Args:
        trainer: A `Trainer` of transformers, or TRL's `SFTTrainer`, `DPOTrainer` or `RewardTrainer`; nothing of it
            changes.
        gpu: A card by name, such as `"rtx 4090"`, or several; without `gpu` and `memory` this machine's, or an A100.
        memory: A card by its memory, such as `"24GiB"`.
        batch_size: One per-device batch size; without it, sizes up to the largest that fits.
        margin: The fraction of the card's memory that is kept free (0.05).
        max_batch_size: The largest size that is considered.
        samples: The longest samples that will come, in place of those of `train_dataset`.
        by_module: Also the bytes by module at the peak, so many names deep (PEFT's names begin with
            `base_model.model`).

    Returns:
        As of `brim.forecast`: `batch_size_max`, `forecasts` with bytes for each size, `cards`.

    Raises:
        RequestError: The trainer or a parameter cannot be used; the message says what to do.
        DoesNotFitError: Not even a batch of one fits the card.

    Examples:
        >>> forecast(trainer, gpu="rtx 4090").batch_size_max  # doctest: +SKIP
        12
    """
    _check(trainer)
    cards: Any = (gpu,) if isinstance(gpu, str) else gpu or ()  # what else it may be, the settings check
    batch_size = checked_batch_size(batch_size)
    accumulation = trainer.args.gradient_accumulation_steps
    with prepared(trainer, training=True) as ready:
        costliest = CostliestSamples.of(trainer, trainer.train_dataset, "Training", samples, "samples")
        workload = TrainingWorkload(ready, costliest, micro_batches=lambda _: accumulation).traced_as()
        own = OwnStep(
            step=workload.step,
            make_batch=workload.make_batch,
            model=workload.modules(),
            optimizer=workload.optimizers(),
            scaler=workload.stateful(),
            batch_length=workload.batch_length,
            device=workload.device,
        )
        settings = ForecastSettings(
            workload=None,
            own=own,
            gpu=cards,
            memory=memory,
            batch_size=batch_size,
            margin=margin,
            max_batch_size=max_batch_size,
            by_module=by_module,
        )
        return forecast_workload(settings)


@dataclasses.dataclass(kw_only=True)
class TrainerFit:
    """The sizes that a trainer was given, why, and what has happened since; `remove` takes the guard off again."""

    per_device_train_batch_size: int | None  # None without training data
    gradient_accumulation_steps: int
    effective_batch: int  # samples between two steps of the optimizer, on all ranks: as it was
    per_device_eval_batch_size: int
    plan: Plan | None  # of training, with its probes
    eval_plan: Plan | None
    notes: list[str]  # also of what happens during training
    guard: TrainerGuard

    @property
    def oom_events(self) -> int:
        """How often a step ran out of memory and was redone in smaller parts."""
        return self.guard.oom_events

    def remove(self) -> None:
        """Give the trainer its own methods back; its sizes stay."""
        self.guard.remove()
        vars(self.guard.trainer).pop(_FIT, None)


def fit_to_memory(
    trainer: Any,
    *,
    batch_size: int | None = None,
    memory_limit: int | str | None = None,
    margin: float | None = None,
    objective: Objective = "fastest",
    evaluation: bool = True,
    samples: Sequence[Any] | None = None,
    eval_samples: Sequence[Any] | None = None,
    max_probes: int | None = None,
) -> TrainerFit:
    """Give a trainer the fastest per-device batch that fits, with the same effective batch; call it before `train()`.

    Sizes are tried with the trainer's own `training_step` on the longest samples of its own data; weights, optimizer
    and random generators are put back bit for bit. Then three methods of this one trainer are wrapped
    (`get_batch_samples`, `training_step`, `prediction_step`): a step that still runs out of memory is redone in smaller
    parts, from zeroed gradients, with the same loss.

    Args:
        trainer: A `Trainer` of transformers, or TRL's `SFTTrainer`, `DPOTrainer` or `RewardTrainer`.
        batch_size: A per-device size of your own, lowered only where it does not fit; by default it is searched for.
        memory_limit: Use at most this much, e.g. `"24GiB"`; by default what is free. Training keeps to it too.
        margin: The fraction that is kept free: 0.05, or 0 with `memory_limit`.
        objective: `"fastest"`, or `"largest"` that fits.
        evaluation: Find `per_device_eval_batch_size` too, where there is an `eval_dataset`.
        samples: The longest samples that will come, in place of those of `train_dataset`.
        eval_samples: The same for `eval_dataset`.
        max_probes: Stop after so many sizes with the best one seen.

    Returns:
        The sizes, the plans with their probes, and `oom_events` and `notes` as training proceeds.

    Raises:
        RequestError: The trainer or a parameter cannot be used; the message says what to do.
        DoesNotFitError: Not even a batch of one fits; the trainer is as it was.

    Examples:
        >>> fit = fit_to_memory(trainer)  # doctest: +SKIP
        >>> fit.per_device_train_batch_size, fit.gradient_accumulation_steps  # doctest: +SKIP
        (16, 4)
    """
    _check(trainer)
    _check_can_fit(trainer)
    batch_size = checked_batch_size(batch_size)
    earlier = vars(trainer).get(_FIT)
    if earlier is not None:
        earlier.remove()
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    settings = SearchSettings(
        memory_limit_bytes=limit, margin=margin, objective=objective, max_probes=max_probes, use_cache=False
    )
    notes: list[str] = []
    plan = eval_plan = None
    if trainer.train_dataset is not None or samples is not None:
        plan = _train_plan(trainer, dataclasses.replace(settings, batch_size=batch_size), samples, notes)
    if evaluation and (trainer.eval_dataset is not None or eval_samples is not None):
        eval_plan = _eval_plan(trainer, settings, eval_samples)
    if plan is None and eval_plan is None:
        raise RequestError("the trainer has neither a train_dataset nor an eval_dataset: there is nothing to fit")
    _set_sizes(trainer, plan, eval_plan, notes)
    return _guarded(trainer, plan, eval_plan, notes, limited=limit is not None)


def _train_plan(trainer: Any, settings: SearchSettings, samples: Sequence[Any] | None, notes: list[str]) -> Plan:
    """Search for a micro-batch; the effective batch is the largest, and only its powers of two where it is one."""
    effective = _effective_per_device(trainer)
    asked = settings.batch_size
    if asked is not None and effective % asked:
        raise RequestError(
            f"{given('batch_size', asked)}: the effective batch is {effective} on a device, and no multiple of it"
        )
    by_twos = asked is None and effective & (effective - 1) == 0
    search = dataclasses.replace(settings, max_size=effective, power_of_two=by_twos)
    with prepared(trainer, training=True) as ready:
        costliest = CostliestSamples.of(trainer, trainer.train_dataset, "Training", samples, "samples")
        two = costliest.batch(2)
        if isinstance(two, Mapping) and two.get("return_loss"):  # CLIP and its like, which have no labels
            raise RequestError(
                "the batches ask for return_loss, a loss that compares all pairs of a batch, so that it depends on the "
                "batch size; give a fixed per_device_train_batch_size"
            )
        workload = TrainingWorkload(
            ready, costliest, micro_batches=lambda size: max(effective // size, 1), largest=effective
        )
        if (undivided := workload.check_loss()) is not None:
            notes.append(undivided)
        layout = BatchLayout.of(two, paired=_is(trainer, _PAIRED))
        if layout.obstacle is not None:
            notes.append(
                f"batches cannot be split, since {layout.obstacle}: a step that runs out of memory will end the run"
            )
        if "sft" in getattr(trainer, "loss_types", ()):
            notes.append(
                "the loss sft is a mean over the tokens of a batch: micro-batches of another size, and parts of one "
                "that is split, count by their pairs"
            )
        return find_plan(workload, search)


def _eval_plan(trainer: Any, settings: SearchSettings, samples: Sequence[Any] | None) -> Plan:
    state_bytes = optimizer_state_bytes(trainer)
    with prepared(trainer, training=False) as ready:
        costliest = CostliestSamples.of(trainer, trainer.eval_dataset, "Evaluation", samples, "eval_samples")
        workload = EvaluationWorkload(ready, costliest, state_bytes=state_bytes, largest=_most_at_once(trainer))
        return find_plan(workload, settings)


def _most_at_once(trainer: Any) -> int | None:
    """Samples of the largest set that is evaluated, on one rank; None where that is not known."""
    data = trainer.eval_dataset
    sets = list(data.values()) if isinstance(data, Mapping) else [data]
    if not all(hasattr(one, "__len__") for one in sets):
        return None
    ranks: int = trainer.args.world_size
    return math.ceil(max(len(one) for one in sets) / ranks)


def _set_sizes(trainer: Any, plan: Plan | None, eval_plan: Plan | None, notes: list[str]) -> None:
    """Into the arguments, and to where the trainer keeps what it has read from them."""
    args = trainer.args
    if plan is not None:
        effective = _effective_per_device(trainer)
        size = _divisor(plan, effective)
        if size < plan.size:
            notes.append(
                f"{plan.size} would be the fastest, but {effective} samples between two steps of the optimizer are no "
                f"multiple of it: {effective // size} micro-batches of {size}"
            )
        if args.dataloader_drop_last and size != args.per_device_train_batch_size:
            notes.append(
                f"dataloader_drop_last leaves out what is left of {size} samples in an epoch, not of "
                f"{args.per_device_train_batch_size}: an epoch may have another number of steps"
            )
        notes += plan.notes
        args.per_device_train_batch_size = size
        args.gradient_accumulation_steps = effective // size
        trainer._train_batch_size = args.train_batch_size  # which was read when the trainer was made
    if eval_plan is not None:
        notes += (note for note in eval_plan.notes if note not in notes)
        args.per_device_eval_batch_size = min(eval_plan.batch_sizes_per_rank or (eval_plan.size,))
        vars(trainer).pop("_eval_dataloaders", None)  # loaders of an earlier evaluation, with the size they had


def _guarded(trainer: Any, plan: Plan | None, eval_plan: Plan | None, notes: list[str], *, limited: bool) -> TrainerFit:
    args = trainer.args
    made = plan or eval_plan
    assert made is not None
    limit_bytes = made.memory.limit_bytes
    guard = TrainerGuard(
        trainer,
        memory=memory_of(args.device),
        paired=_is(trainer, _PAIRED),
        note=_noting(notes),
        train_sizes=None if plan is None else _sizes(args.per_device_train_batch_size, limit_bytes),
        eval_sizes=_sizes(args.per_device_eval_batch_size, limit_bytes),
        limit_bytes=limit_bytes if limited else None,
    )
    guard.install()
    fit = TrainerFit(
        per_device_train_batch_size=None if plan is None else args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        effective_batch=_effective_per_device(trainer) * args.world_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        plan=plan,
        eval_plan=eval_plan,
        notes=notes,
        guard=guard,
    )
    for line in notes:
        _log.warning(line)
    setattr(trainer, _FIT, fit)
    return fit


def _noting(notes: list[str]) -> Callable[[str], None]:
    """Keep a line, and log it the first time: a long run may mend the same thing often."""

    def note(line: str) -> None:
        if line not in notes:
            notes.append(line)
            _log.warning(line)

    return note


def _sizes(size: int, limit_bytes: int | None) -> MicroBatchSizer:
    """Parts are as large as the batch, until one fails; then they grow back."""
    return MicroBatchSizer(MicroBatchRequest(ceiling=None, known=size, largest=size, limit_bytes=limit_bytes))


def _divisor(plan: Plan, effective: int) -> int:
    """The size that the effective batch is a multiple of: the next one below what was found, or above, if that is far
    nearer and was seen to fit."""
    divisors = [size for size in range(1, effective + 1) if effective % size == 0]
    below = max(size for size in divisors if size <= plan.size)
    above = min((size for size in divisors if size > plan.size), default=effective + 1)
    return above if above <= plan.batch_size_max and plan.size / below > above / plan.size else below


def _effective_per_device(trainer: Any) -> int:
    return int(trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps)


def _is(trainer: Any, names: Sequence[str]) -> bool:
    """Whether it is one of these trainers of TRL, by name: TRL itself need not be imported for that."""
    return any(kind.__name__ in names and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def _check(trainer: Any) -> None:
    try:
        from transformers import Trainer
    except ImportError as error:
        raise RequestError(
            f"brim.integrations.transformers needs transformers with its trainer ({error}); pip install "
            "'transformers[torch]'"
        ) from error
    if not isinstance(trainer, Trainer):
        raise RequestError(f"{type(trainer).__name__} is no Trainer of transformers; pass the trainer itself")
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if of_trl and not _is(trainer, _OF_TRL):
        raise RequestError(
            f"{of_trl[0]} ties its batches to something else than memory, such as the answers to one prompt; brim "
            f"takes Trainer, {', '.join(_OF_TRL)} and what is built on them"
        )
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if sharded or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise RequestError(
            "the trainer shards its model over ranks (DeepSpeed, FSDP or a parallelism_config): one rank cannot try "
            "sizes alone; give a fixed per_device_train_batch_size"
        )
    if getattr(trainer, "is_model_parallel", False):
        raise RequestError(
            "the trainer's model lies on several devices (device_map): brim measures one; give a fixed "
            "per_device_train_batch_size"
        )
    if trainer.args.n_gpu > 1:
        raise RequestError(
            f"the trainer would use {trainer.args.n_gpu} GPUs in one process (DataParallel); start it with torchrun, "
            "or show it one card with CUDA_VISIBLE_DEVICES"
        )


def _check_can_fit(trainer: Any) -> None:
    if trainer.is_in_train:
        raise RequestError(
            "the trainer is training, or its last train() ended by an error or Ctrl-C: call it before train(), on a "
            "new trainer"
        )
    if trainer.args.auto_find_batch_size:
        raise RequestError(
            f"{given('auto_find_batch_size', True)}: it restarts the whole training after an error, with another "
            "effective batch; leave it out of the trainer's arguments"
        )
    losses = [name for name in getattr(trainer, "loss_types", ()) if name in _OVER_THE_BATCH]
    if losses:
        raise RequestError(
            f"the loss {losses[0]} sorts all pairs of a batch, so that it depends on the batch size; give a fixed "
            "per_device_train_batch_size"
        )
