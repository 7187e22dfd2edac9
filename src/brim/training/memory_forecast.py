"""The memory forecast of a training run: its training step as a workload for `brim.forecasting`."""

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
from brim.training.setup import TrainingSetup
from brim.workloads.train_step import TrainStepWorkload

__all__ = ["forecast_peak_bytes", "size_to_trace", "training_workload"]

DISTINCT_SAMPLES = 32  # at most in a traced batch, which repeats them: reading and decoding files takes time
HOST_BATCH_BYTES = 2**29  # the largest batch that is made on the host for a trace


def forecast_peak_bytes(setup: TrainingSetup, micro_batch: int) -> int | None:
    """Peak bytes of a step on micro-batches of this size: reserved on CUDA, allocated on the CPU.

    None for a model that cannot be traced: a run needs no forecast.
    """
    on_cuda = setup.device.type == "cuda"
    try:
        traced = TracedWorkload(training_workload(setup))
        forecast = Forecaster(traced, choose_gpu(None, None), workspaces=on_cuda).at(micro_batch)
    except BrimError:
        return None
    return forecast.peak_reserved_bytes if on_cuda else forecast.peak_allocated_bytes


def training_workload(setup: TrainingSetup) -> TrainStepWorkload:
    """The run's training step on batches of any size, which repeat the costliest samples.

    The tracer does not see how samples are prepared and joined: that takes memory of the host, not of the GPU.
    """
    items = setup.data.train
    costliest = sorted(range(len(items)), key=lambda item: -items.cost(item))[:DISTINCT_SAMPLES]
    prepared: dict[int, Any] = {}
    trainable = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
    options = optimizer_options(setup.settings)

    def host_batch(size: int) -> Batch:
        chosen = [costliest[place % len(costliest)] for place in range(size)]
        for item in chosen:
            if item not in prepared:
                prepared[item] = items.prepare(item)
        return items.batch(chosen, [prepared[item] for item in chosen]).to(torch.device("cpu"), setup.dtype)

    def make_batch(size: int) -> tuple[Any, Any]:
        batch: Batch = run_for_real(host_batch, size)
        batch = batch.to(setup.device)
        return batch.inputs, batch.labels

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        summed = setup.objective.loss(model, Batch(*batch))
        return summed.total / summed.weight

    return TrainStepWorkload(
        model=setup.model,
        make_batch=make_batch,
        loss=loss,
        optimizer=make_training_optimizer(setup.settings.optimizer.name, trainable, options),
        device=setup.device,
        autocast_dtype=setup.autocast,
        scaler=torch.amp.GradScaler(setup.device.type) if setup.loss_scaling else None,
        identity=_identity(setup),
        smallest_size=setup.smallest_micro_batch,
        largest_size=len(items),
        repeats=setup.bundle.input_kind != "own",  # of a factory's model that is not known
    )


def size_to_trace(workload: TrainStepWorkload, size: int) -> int | None:
    """The size, if a batch of it is small enough to be made on the host; None: smaller sizes are to be traced."""
    smallest = max(workload.smallest_size(), 1)
    leaves = tree_leaves(workload.make_batch(smallest))
    held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return size if held * size <= HOST_BATCH_BYTES * smallest else None


def _identity(setup: TrainingSetup) -> dict[str, Any]:
    """What the memory of a step depends on, with the keys of `brim forecast`."""
    objective = setup.objective
    settings = setup.settings
    return {
        **setup.bundle.identity,
        **({"classes": objective.classes} if isinstance(objective, Classification) else {}),
        "dtype": str(setup.autocast or setup.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in setup.model.parameters()),
        "optimizer": settings.optimizer.name.lower(),
        "gradient_checkpointing": settings.training.gradient_checkpointing,
        "data": setup.data.name,
    }
