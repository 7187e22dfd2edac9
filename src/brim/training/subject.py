"""What is trained, opened: the data, the model and where it runs. Knows nothing of sizes, ranks or folders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from brim.data.base import DataError
from brim.errors import RequestError
from brim.memory.failures import memory_remedies, memory_savings
from brim.memory.weights import place_weights
from brim.models.placement import resolve_device, resolve_precision
from brim.settings.train_settings import TrainSettings
from brim.training.data_sets import TrainingData, make_items, read_data
from brim.training.dense_objectives import Detection, Segmentation
from brim.training.learner import Learner, build_learner, model_reads, smaller_inputs, smallest_micro_batch
from brim.training.listener import TrainFacts
from brim.training.objective import Classification, Objective, OwnLoss, Regression
from brim.training.optimizers import optimizer_options
from brim.training.schedules import scheduler_class
from brim.workloads.checkpointing import can_checkpoint, enable_gradient_checkpointing

__all__ = ["Subject", "open_subject"]

_BATCH_NORM = (
    "the model has batch normalisation: each micro-batch is normalised by its own statistics, so that accumulated "
    "micro-batches are not equivalent to one big batch"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on its device, with its data and its objective."""

    settings: TrainSettings
    learner: Learner
    data: TrainingData
    objective: Objective
    device: torch.device
    dtype: torch.dtype  # of the weights
    autocast: torch.dtype | None
    scaled: bool
    smallest: int  # samples that a micro-batch must have
    notes: tuple[str, ...]
    model_of: Callable[[int], nn.Module]  # the same model with the weights of another seed, on the CPU

    @property
    def model(self) -> nn.Module:
        """The model, in training mode."""
        return self.learner.model

    def identity(self) -> dict[str, Mapping[str, Any]]:
        """What the result of a run depends on beside its batch, in parts: model, data, settings."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        settings = self.settings.to_json()
        for name in ("epochs", "max_steps", "batch_size", "effective_batch", "base_batch"):
            settings["hp"].pop(name)
        kept = ("gradient_clip", "lr_scale", "scale_betas", "fsdp")
        settings["training"] = {name: settings["training"][name] for name in kept}
        settings["data"].pop("num_workers")
        return {
            "model": {"name": self.learner.name, **self.learner.identity, "shapes": shapes},
            "data": dict(self.data.facts),
            "settings": {**settings, "dtype": str(self.autocast or self.dtype)},
        }

    def remedies(self, samples: int, *, training: bool = True) -> list[str]:
        """What to propose where so many samples do not fit: settings that this model takes, and no others."""
        checkpoints = training and not self.settings.training.gradient_checkpointing and can_checkpoint(self.model)
        savings = memory_savings(
            half_precision="training.dtype=bfloat16" if self.autocast is None else "",
            smaller=smaller_inputs(self.settings),
            checkpointing="training.gradient_checkpointing=true" if checkpoints else "",
        )
        more = "another device with more memory (training.device), or a larger training.memory_limit"
        return memory_remedies(savings, batch_size=samples, more=more)

    def facts(self, *, epochs: int, effective_batch: int, learning_rate: float, ranks: int = 1) -> TrainFacts:
        """What is trained, for those who watch."""
        samples, held_out = len(self.data.train), self.data.validation
        return TrainFacts(
            model=self.learner.name,
            data=self.data.name,
            task=self.objective.task,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            train_samples=samples,
            validation_samples=0 if held_out is None else len(held_out),
            device=str(self.device),
            epochs=epochs,
            steps_per_epoch=math.ceil(samples / effective_batch),
            effective_batch=effective_batch,
            learning_rate=learning_rate,
            ranks=ranks,
        )


def open_subject(settings: TrainSettings) -> Subject:
    """Check what is cheap to check, read the data, build the model and put it on its device."""
    optimizer_options(settings)
    scheduler_class(settings.scheduler.name)
    device = resolve_device(settings.training.device)
    double = settings.training.dtype == "float64"
    precision = resolve_precision("float32" if double else settings.training.dtype, "train")
    dtype = torch.float64 if double else torch.float32
    if double and device.type == "mps":
        raise RequestError("training.dtype float64: mps has no double precision; use cpu or float32")
    reads = model_reads(settings)
    read = read_data(settings, reads)
    learner = build_learner(settings, outputs=read.outputs, rows=read.rows)
    data = make_items(read, learner, dtype=dtype)
    objective = _objective(settings, data, learner, read.outputs)
    notes = [*read.notes, *learner.notes]
    model = learner.model
    _refuse_synced(model)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        notes.append(_BATCH_NORM)
    smallest = smallest_micro_batch(model, lambda: _first_inputs(data))
    place_weights(model, device, name=learner.name, dtype=dtype).train()
    if settings.training.gradient_checkpointing:
        notes.append(enable_gradient_checkpointing(model))

    def model_of(seed: int) -> nn.Module:
        reseeded = dataclasses.replace(settings, hp=dataclasses.replace(settings.hp, seed=seed))
        return build_learner(reseeded, outputs=read.outputs, rows=read.rows).model.to(dtype)

    return Subject(
        settings=settings,
        learner=learner,
        data=data,
        objective=objective,
        device=device,
        dtype=dtype,
        autocast=precision.autocast,
        scaled=precision.scaled,
        smallest=smallest,
        notes=tuple(notes),
        model_of=model_of,
    )


def _first_inputs(data: TrainingData) -> Any:
    try:
        return data.train.batch([0]).inputs
    except DataError as error:
        raise RequestError(f"training sample {data.train.ids[0]} cannot be used: {error}") from error


def _objective(settings: TrainSettings, data: TrainingData, learner: Learner, outputs: int) -> Objective:
    if hasattr(learner.model, "training_loss"):
        return OwnLoss()
    if data.task == "own":
        raise RequestError(
            f"data.type {settings.data.type}: its samples are not (input, label) pairs, and the model has no method "
            "training_loss(batch) to learn from them"
        )
    if data.task == "segment":
        return Segmentation(outputs)
    if data.task == "detect":
        return Detection()
    if data.task == "regress":
        return Regression()
    return Classification(outputs, label_smoothing=settings.hp.label_smoothing)


def _refuse_synced(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise RequestError(
                f"model.type: {name or 'the model'} is SyncBatchNorm, which talks to the other ranks in every forward; "
                "here a micro-batch runs on its rank alone, so that one rank may run out of memory and repeat it. Use "
                "BatchNorm (statistics are averaged over the ranks after each epoch), GroupNorm or LayerNorm"
            )
