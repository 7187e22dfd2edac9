"""`brim ood --compare-batch`: heads of all seeds trained a little at several effective batches.

Every trial makes the same number of epochs from the same weights, so every size has seen the same samples.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brim.comparing.sizes import too_short
from brim.errors import BrimError
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.memory.devices import memory_of, resolve_limit
from brim.models.placement import resolve_precision
from brim.molecules.data_sets import FeatureSet
from brim.molecules.heads import HeadResult, OodListener, TrainedHeads, make_heads, train_heads
from brim.molecules.losses import PreferenceLoss, loss_of
from brim.settings.molecule_settings import OodRequest
from brim.workloads.optimizers import make_optimizer
from brim.workloads.train_step import TrainStepWorkload

__all__ = ["HeadTrials"]

TRIAL_EPOCHS = 8  # of each trial; all of them where fewer are asked for
FEWEST_STEPS = 4  # of each head in a trial, for a steady rate


class HeadTrials:
    """Short trainings on one set of features, one for each turn of a comparison."""

    def __init__(
        self, features: FeatureSet, request: OodRequest, *, device: torch.device, note: Callable[[str], None]
    ) -> None:
        self._features, self._request, self._device = features, request, device
        self._listener = _NotesOnly(note)
        self._paths: dict[int, str] = {}  # how each size was trained first: the choice is part of the warm-up
        self._loss = request.losses[0]
        self._runs = [(seed, request.lrs[0]) for seed in request.seeds]
        self._rows_per_epoch = 0

    def measure(self, size: int, first: bool) -> dict[str, Any]:
        """Speed, loss, AUROC and memory of one trial; the first of a size also forecasts its memory."""
        epochs = min(self._request.epochs, TRIAL_EPOCHS)
        trial = dataclasses.replace(
            self._request, effective_batch=size, epochs=epochs, patience=None, validate_every=epochs,
            fast_path=self._paths.get(size, self._request.fast_path),
        )  # fmt: skip
        heads = train_heads(
            self._features, loss_of(trial, self._loss), self._runs, trial, device=self._device, listener=self._listener
        )
        trained = heads.trained
        self._paths[size] = trained.path
        self._rows_per_epoch = trained.rows // epochs
        memory_of(self._device).release()
        limit = resolve_limit(
            memory_of(self._device), asked_bytes=trial.memory_limit_bytes, margin=trial.margin
        ).usable_bytes  # fmt: skip
        peak = trained.peak_reserved_bytes or trained.peak_allocated_bytes
        return {
            **_learnt(heads.results),
            **_sizes(heads),
            "samples_per_second": trained.rows / trained.train_seconds if trained.train_seconds else None,
            "peak_allocated_bytes": trained.peak_allocated_bytes,
            "peak_reserved_bytes": peak,
            "limit_bytes": limit,
            "headroom_fraction": 1 - peak / limit if peak else None,
            "gpu_utilisation_mean": None,
            "trial_samples": trained.rows,
            "too_short": _too_short(heads, epochs, size),
            **({"forecast_peak_bytes": self._forecast_bytes(trial, heads)} if first else {}),
        }

    def _forecast_bytes(self, trial: OodRequest, heads: TrainedHeads) -> int | None:
        """Peak bytes of a step: those of one head's step, for each head of the stack, and the rows on the device.

        None for a step that cannot be traced.
        """
        trained = heads.trained
        on_cuda = self._device.type == "cuda"
        workload = _step_workload(self._features, trial, loss_of(trial, self._loss), self._device)
        try:
            forecaster = Forecaster(TracedWorkload(workload), choose_gpu(None, None), workspaces=on_cuda)
            found = forecaster.at(trained.micro_batch_size)
        except BrimError:
            return None
        cached = found.peak_reserved_bytes - found.peak_allocated_bytes if on_cuda else 0
        parts = (self._features.features[part].nbytes for part in ("train_in", "train_out"))
        rows = sum(parts) if trained.path != "off" else 0
        return trained.stack * found.peak_allocated_bytes + cached + rows

    def times(self, row: dict[str, Any]) -> dict[str, Any]:
        """What follows from the rate: an epoch of all heads, and all epochs."""
        epoch = self._rows_per_epoch / row["samples_per_second"]
        return {"epoch_seconds": epoch, "total_seconds": epoch * self._request.epochs}


def _step_workload(
    features: FeatureSet, request: OodRequest, loss: PreferenceLoss, device: torch.device
) -> TrainStepWorkload:
    """The training step of one head, on so many rows of both sides."""
    make_head = make_heads(
        features.width, request.hidden, dropout=request.dropout, checkpointing=request.gradient_checkpointing
    )
    head = make_head(request.seeds[0]).to(device)

    def make_batch(rows: int) -> torch.Tensor:
        return torch.zeros(rows, features.width, device=device)

    def compute_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        energies = model(rows)
        inner, outer = energies[: (len(rows) + 1) // 2], energies[(len(rows) + 1) // 2 :]
        reference = (inner.detach(), outer.detach()) if loss.needs_reference else None
        return loss(inner, outer, reference=reference)

    return TrainStepWorkload(
        model=head, make_batch=make_batch, loss=compute_loss, device=device, smallest_size=2,
        optimizer=make_optimizer(request.optimizer, [*head.parameters()], request.lrs[0]),
        autocast_dtype=resolve_precision(request.dtype, "train").autocast,
    )  # fmt: skip


def _sizes(heads: TrainedHeads) -> dict[str, Any]:
    trained = heads.trained
    share = trained.effective_batch_size / trained.rows_per_step  # rows of both sides → samples of each
    return {
        "effective_batch_size": trained.effective_batch_size,
        "micro_batch_size": max(1, round(trained.micro_batch_size * share)),
        "accumulation_steps": trained.accumulation_steps,
        "steps_per_epoch": trained.steps_per_epoch,
        "fast_path": trained.path,
        "stack": trained.stack,
        "oom_events": heads.oom_events,
    }


def _learnt(results: tuple[HeadResult, ...]) -> dict[str, Any]:
    """The mean last loss and the mean AUROC on the test parts; None where every run failed."""
    losses = [one.outcome.losses[-1] for one in results if one.outcome.error is None and one.outcome.losses]
    scores = [one.metrics["auroc"] for one in results if one.metrics is not None]
    return {
        "final_loss": statistics.fmean(losses) if losses else None,
        "auroc": statistics.fmean(scores) if scores else None,
    }


def _too_short(heads: TrainedHeads, epochs: int, size: int) -> str | None:
    steps = heads.trained.steps_per_epoch * epochs
    return too_short(steps * heads.trained.effective_batch_size, size, batches=FEWEST_STEPS)


class _NotesOnly(OodListener):
    """Forwards notes, but no progress: every size is trained again and again."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._forward = note

    def note(self, line: str) -> None:
        """Forward a note."""
        self._forward(line)
