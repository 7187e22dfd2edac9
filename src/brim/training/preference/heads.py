"""Trains the energy heads of one data set, all seeds and learning rates at once, and tests each at its best epoch."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from brim.memory.devices import memory_of
from brim.metrics.detection import detection_metrics
from brim.training.fast_path.row_feed import InPasses
from brim.training.fast_path.task import (
    Batch,
    Counts,
    Outputs,
    RowData,
    RunOutcome,
    RunsListener,
    RunSpec,
    Settings,
    TrainingTask,
)
from brim.training.fast_path.train_runs import TrainedRuns, train_runs
from brim.training.preference.head import make_heads
from brim.training.preference.losses import PreferenceLoss
from brim.training.preference.parts import FeatureSet
from brim.training.preference.scoring import stacked_auroc

__all__ = ["HeadResult", "HeadSettings", "TrainedHeads", "train_heads"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What heads are trained with, beside the settings of any training."""

    loss: PreferenceLoss
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    training: Settings
    micro_batch_size: int | None = None
    eval_batch_size: int | None = None
    path: str = "auto"
    memory_limit_bytes: int | None = None
    margin: float | None = None
    reference: dict[str, torch.Tensor] | None = None  # a trained head for the reference loss; None: each run's first


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadResult:
    """One run: its figures on the test parts, or why it has none."""

    outcome: RunOutcome
    metrics: dict[str, float] | None
    validation: float | None  # AUROC of the best epoch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedHeads:
    """Every run's result, how they were trained, and what testing took."""

    results: tuple[HeadResult, ...]
    trained: TrainedRuns
    eval_batch_size: int
    eval_seconds: float
    eval_peak_allocated_bytes: int | None
    eval_peak_reserved_bytes: int | None
    oom_events: int


def train_heads(
    features: FeatureSet,
    specs: Sequence[RunSpec],
    settings: HeadSettings,
    *,
    device: torch.device,
    listener: RunsListener | None = None,
) -> TrainedHeads:
    """Train a head for every run on the training parts, stop it by the validation parts, judge it on the test parts."""
    make_head = make_heads(features.width, settings.hidden, dropout=settings.dropout)
    memory = memory_of(device)
    passes = InPasses(memory, batch_size=settings.eval_batch_size, dim=1)
    home = torch.device("cpu") if settings.path == "off" else device
    validation = [features.features[part].to(home) for part in ("val_in", "val_out")]

    def validate(outputs: Outputs) -> list[float]:
        inner, outer = (passes(outputs, rows) for rows in validation)
        return stacked_auroc(inner, outer)

    problem = TrainingTask(
        make_model=make_head,
        data=_rows(features, specs, settings, make_head, device),
        criterion=_criterion(_within(settings.loss, settings.memory_limit_bytes)),
        validate=validate,
    )
    trained = train_runs(
        problem,
        specs,
        dataclasses.replace(settings.training, matched=settings.loss.matched),
        device=device,
        path=settings.path,
        micro_batch_size=settings.micro_batch_size,
        memory_limit_bytes=settings.memory_limit_bytes,
        margin=settings.margin,
        listener=listener,
    )
    memory.release(thorough=False)
    started = time.perf_counter()
    tester = InPasses(memory, batch_size=settings.eval_batch_size)
    with memory.metered() as reading:
        results = tuple(_tested(outcome, make_head, features, tester, device) for outcome in trained.outcomes)
    return TrainedHeads(
        results=results,
        trained=trained,
        eval_batch_size=max(tester.largest, passes.largest),
        eval_seconds=time.perf_counter() - started,
        eval_peak_allocated_bytes=reading.peak_allocated_bytes or None,
        eval_peak_reserved_bytes=reading.peak_reserved_bytes or None,
        oom_events=trained.oom_events + passes.oom_events + tester.oom_events,
    )


def _within(loss: PreferenceLoss, limit_bytes: int | None) -> PreferenceLoss:
    """Pair blocks that are small against the memory limit."""
    if limit_bytes is None:
        return loss
    return dataclasses.replace(loss, block_bytes=min(max(limit_bytes // 64, 2**16), 2**25))


def _criterion(loss: PreferenceLoss) -> Any:
    def criterion(energies: torch.Tensor, batch: Batch, counts: Counts) -> torch.Tensor:
        first = counts[0]
        reference = (batch["reference"][:first], batch["reference"][first:]) if loss.needs_reference else None
        return loss(energies[:first], energies[first:], reference=reference)

    return criterion


def _rows(
    features: FeatureSet,
    specs: Sequence[RunSpec],
    settings: HeadSettings,
    make_head: Any,
    device: torch.device,
) -> RowData:
    """The training rows, in before out; with the reference head's energies, which never change, computed once."""
    parts = [features.features[part] for part in ("train_in", "train_out")]
    rows = torch.cat(parts)
    per_run = {}
    if settings.loss.needs_reference:
        energies = []
        for spec in specs:
            head = make_head(spec.seed)
            if settings.reference is not None:
                head.load_state_dict(settings.reference)
            passes = InPasses(memory_of(device), batch_size=settings.eval_batch_size)
            energies.append(_energies(head, rows, passes, device))
        per_run["reference"] = torch.stack(energies)
    return RowData(
        tensors={"features": rows},
        lengths=(len(parts[0]), len(parts[1])),
        per_run=per_run,
        ids=[*features.ids["train_in"], *features.ids["train_out"]],
    )


def _tested(
    outcome: RunOutcome, make_head: Any, features: FeatureSet, passes: InPasses, device: torch.device
) -> HeadResult:
    best = max((figure for figure in outcome.validations if math.isfinite(figure)), default=None)
    if outcome.error is not None or not outcome.weights:
        return HeadResult(outcome=outcome, metrics=None, validation=best)
    head = make_head(outcome.spec.seed)
    head.load_state_dict(outcome.weights)
    inner, outer = (_energies(head, features.features[part], passes, device) for part in ("test_in", "test_out"))
    return HeadResult(outcome=outcome, metrics=detection_metrics(inner.numpy(), outer.numpy()), validation=best)


def _energies(head: nn.Module, rows: torch.Tensor, passes: InPasses, device: torch.device) -> torch.Tensor:
    """The energies of rows, on the CPU."""
    head = head.eval().to(device)
    with torch.no_grad():
        return passes(lambda part: head(part.to(device)).cpu(), rows)
