"""The forecast memory of a training run's micro-batch: the one place where a run is made a workload for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from brim.errors import BrimError
from brim.forecast.forecast import forecast_memory
from brim.train.objective import Batch
from brim.train.optimizers import make_training_optimizer, optimizer_options
from brim.train.subject import Subject
from brim.workloads.train_step import TrainStepWorkload

__all__ = ["forecast_peak_bytes", "training_workload"]


def forecast_peak_bytes(subject: Subject, micro_batch: int) -> int | None:
    """Peak bytes of a step on micro-batches of this size: reserved on CUDA, allocated on the CPU.

    None for a model that cannot be traced: a forecast is a help, not a condition.
    """
    try:
        forecast = forecast_memory(training_workload(subject), micro_batch)
    except BrimError:
        return None
    if subject.device.type == "cuda":
        return forecast.peak_reserved_bytes
    return forecast.peak_allocated_bytes - int(forecast.breakdown.get("workspaces", 0))


def training_workload(subject: Subject) -> TrainStepWorkload:
    """The run's training step on batches of any size, made of the first samples over and over."""
    items = subject.data.train
    trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    options = optimizer_options(subject.settings)

    def make_batch(size: int) -> tuple[Any, Any]:
        dearest = sorted(range(len(items)), key=lambda item: -items.cost(item))[:size]
        chosen = [dearest[place % len(dearest)] for place in range(size)]
        batch = items.batch(chosen).to(subject.device, subject.dtype)
        return batch.inputs, batch.labels

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = subject.objective.loss(model, Batch(*batch))
        return found.total / found.weight

    return TrainStepWorkload(
        model=subject.model,
        make_batch=make_batch,
        loss=loss,
        optimizer=make_training_optimizer(subject.settings.optimizer.name, trainable, options),
        device=subject.device,
        autocast_dtype=subject.autocast,
        scaler=torch.amp.GradScaler(subject.device.type) if subject.scaled else None,
        smallest_size=subject.smallest,
        largest_size=len(items),
    )
