"""Whether several seeds of a training can go through the fast path and come out as each alone would, or why not.

What is refused here is trained one after the other by the ordinary loop. A model is tried on a few rows: whether it
draws random numbers or changes its buffers is seen, not guessed from its class.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from brim.errors import plural
from brim.memory.devices import memory_of, resolve_limit
from brim.settings.caller import named, written
from brim.settings.sizes import format_bytes
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import TrainSettings
from brim.training.effective_batch import EarlierSizes, EffectiveBatch, choose_effective_batch
from brim.training.fast_path.choose import USABLE_MEMORY_FRACTION
from brim.training.fast_path.update_rules import rule_for
from brim.training.items import TensorItems
from brim.training.models import InputKind
from brim.training.objective import Classification, Regression
from brim.training.seeds.variants import RateTable, Variant, epochs_run, make_rate_table
from brim.training.setup import TrainingSetup

__all__ = ["StackSetup", "judge_suitability", "refused_by_kind", "refused_by_request"]

ROWS_TRIED = 4
_KINDS: dict[InputKind, str] = {"video": "clips", "image": "pictures", "text": "texts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackSetup:
    """A training that the fast path takes: model and rows, what was asked for, and what follows from both."""

    subject: TrainingSetup
    request: TrainRequest
    effective: EffectiveBatch
    epochs: int
    tables: dict[float, RateTable]  # by learning rate
    notes: tuple[str, ...] = ()


def refused_by_kind(reads: InputKind) -> str | None:
    """Before anything is opened: what is read as the run goes cannot lie on the device."""
    return f"it learns from {_KINDS[reads]}, not from rows of features" if reads in _KINDS else None


def refused_by_request(request: TrainRequest) -> str | None:
    """What was asked for that only the loop does."""
    training = request.settings.training
    if request.fast_path == "off":
        return "asked for"
    if training.checkpoint_every is not None:
        return "training.checkpoint_every asks for checkpoints inside an epoch"
    if training.gradient_checkpointing:
        return "training.gradient_checkpointing is on"
    if training.fsdp:
        return "training.fsdp is on"
    return f"{named('fail_on_oom')} is given" if request.fail_on_oom else None


def judge_suitability(subject: TrainingSetup, request: TrainRequest, variants: Sequence[Variant]) -> StackSetup | str:
    """What the fast path needs, or why the loop must train these runs."""
    settings = request.settings
    if not isinstance(subject.data.train, TensorItems) or not isinstance(
        subject.data.validation, (TensorItems, type(None))
    ):
        return f"{subject.data.name} is not rows of features in memory"
    if not isinstance(subject.objective, (Classification, Regression)):
        return "the model has a loss of its own"
    earlier = EarlierSizes.read(request.plan) if request.plan is not None else None
    samples = len(subject.data.train)
    effective = choose_effective_batch(settings, samples=samples, ranks=1, earlier=earlier)
    if effective.grows:
        return "the effective batch grows with each seed's own noise"
    micro = earlier.micro_cap if earlier is not None else settings.hp.batch_size
    if isinstance(micro, int) and micro < effective.batch:
        return f"a step of {effective.batch} is accumulated from micro-batches of {micro}"
    steps = math.ceil(samples / effective.batch)
    epochs = epochs_run(settings, steps_per_epoch=steps)
    if epochs is None:
        return f"hp.max_steps {settings.hp.max_steps} ends inside an epoch of {plural(steps, 'step')}"
    tables = _rate_tables(settings, effective, variants, samples=samples, epochs=epochs)
    if isinstance(tables, str):
        return tables
    first = next(iter(tables.values()))
    if rule_for(settings.optimizer.name, first.options) is None:
        return f"optimizer {settings.optimizer.name} with these options has no stacked form"
    refused = _refused_by_room(subject, request) or _refused_by_model(subject, request)
    if refused is not None:
        return refused
    notes = (*subject.notes, *effective.notes, *first.notes)
    return StackSetup(subject=subject, request=request, effective=effective, epochs=epochs, tables=tables, notes=notes)


def _rate_tables(
    settings: TrainSettings, effective: EffectiveBatch, variants: Sequence[Variant], *, samples: int, epochs: int
) -> dict[float, RateTable] | str:
    tables: dict[float, RateTable] = {}
    for variant in variants:
        if variant.learning_rate not in tables:
            found = make_rate_table(variant.settings(settings), effective, samples=samples, epochs=epochs)
            if isinstance(found, str):
                return found
            tables[variant.learning_rate] = found
    return tables


def _refused_by_room(subject: TrainingSetup, request: TrainRequest) -> str | None:
    """Rows that are not small against the memory there is stay where they are."""
    rows = [items.rows for items in (subject.data.train, subject.data.validation) if isinstance(items, TensorItems)]
    needed = sum(one.nbytes for one in rows)
    limit = resolve_limit(
        memory_of(subject.device), asked_bytes=request.memory_limit_bytes, margin=request.settings.training.margin
    )
    if needed <= USABLE_MEMORY_FRACTION * limit.usable_bytes:
        return None
    return f"the rows take {format_bytes(needed)} of {format_bytes(limit.usable_bytes)}"


def _refused_by_model(subject: TrainingSetup, request: TrainRequest) -> str | None:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in subject.model.modules()):
        return "the model has batch normalisation"
    assert isinstance(subject.data.train, TensorItems)
    rows = subject.data.train.rows[:ROWS_TRIED]
    model = copy.deepcopy(subject.model).to("cpu").train()
    buffers = [buffer.clone() for buffer in model.buffers()]
    drawn = torch.get_rng_state()
    with torch.no_grad():
        outputs = model(rows)
    draws = not torch.equal(drawn, torch.get_rng_state())
    torch.set_rng_state(drawn)
    if not isinstance(outputs, torch.Tensor):
        return f"the model gives {type(outputs).__name__}, not one tensor"
    if any(not torch.equal(before, after) for before, after in zip(buffers, model.buffers(), strict=True)):
        return "the model's buffers change as it trains"
    if draws and request.fast_path == "auto":
        allowed = written("fast_path", "stacked")
        return f"the model draws noise (dropout), other in a stack than alone; {allowed} allows that"
    return None
