"""The forecast memory of a training run's micro-batch: the one place where a run is made a workload for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from brim.errors import BrimError
from brim.forecasting.forecast import Forecaster, TracedWorkload, choose_gpu
from brim.forecasting.values import run_for_real
from brim.training.objective import Batch, Classification
from brim.training.optimizers import make_training_optimizer, optimizer_options
from brim.training.subject import Subject
from brim.workloads.train_step import TrainStepWorkload

__all__ = ["forecast_peak_bytes", "size_to_trace", "training_workload"]

DISTINCT_SAMPLES = 32  # at most, that a batch is made of: some are read from files and decoded
HOST_BATCH_BYTES = 2**29  # of a batch that is made on the host only to be traced


def forecast_peak_bytes(subject: Subject, micro_batch: int) -> int | None:
    """Peak bytes of a step on micro-batches of this size: reserved on CUDA, allocated on the CPU.

    None for a model that cannot be traced: a forecast is a help, not a condition.
    """
    on_card = subject.device.type == "cuda"
    try:
        traced = TracedWorkload(training_workload(subject))
        forecast = Forecaster(traced, choose_gpu(None, None), workspaces=on_card).at(micro_batch)
    except BrimError:
        return None
    return forecast.peak_reserved_bytes if on_card else forecast.peak_allocated_bytes


def training_workload(subject: Subject) -> TrainStepWorkload:
    """The run's training step on batches of any size, made of the costliest samples over and over.

    Samples are prepared and joined past the tracer: that happens on the host, and takes nothing of the card.
    """
    items = subject.data.train
    costliest = sorted(range(len(items)), key=lambda item: -items.cost(item))[:DISTINCT_SAMPLES]
    prepared: dict[int, Any] = {}
    trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    options = optimizer_options(subject.settings)

    def host_batch(size: int) -> Batch:
        chosen = [costliest[place % len(costliest)] for place in range(size)]
        for item in chosen:
            if item not in prepared:
                prepared[item] = items.prepare(item)
        return items.batch(chosen, [prepared[item] for item in chosen]).to(torch.device("cpu"), subject.dtype)

    def make_batch(size: int) -> tuple[Any, Any]:
        batch: Batch = run_for_real(host_batch, size)
        batch = batch.to(subject.device)
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
        identity=_identity(subject),
        smallest_size=subject.smallest,
        largest_size=len(items),
    )


def size_to_trace(workload: TrainStepWorkload, size: int) -> int | None:
    """The size, where a batch of it is small enough to be made on the host; else None, and smaller ones are traced."""
    smallest = max(workload.smallest_size(), 1)
    leaves = tree_leaves(workload.make_batch(smallest))
    held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return size if held * size <= HOST_BATCH_BYTES * smallest else None


def _identity(subject: Subject) -> dict[str, Any]:
    """What its memory depends on, with the keys that `brim forecast` has for it too."""
    objective = subject.objective
    settings = subject.settings
    return {
        **subject.learner.identity,
        **({"classes": objective.classes} if isinstance(objective, Classification) else {}),
        "dtype": str(subject.autocast or subject.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "optimizer": settings.optimizer.name.lower(),
        "gradient_checkpointing": settings.training.gradient_checkpointing,
        "data": subject.data.name,
    }
