"""What a run trains: data, model, objective and device, made from the settings. No batch sizes, ranks or folders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from brim.data.base import DataError
from brim.errors import RequestError
from brim.memory.device_start import start_device
from brim.memory.devices import device_uuid
from brim.memory.failures import memory_remedies, memory_savings
from brim.memory.weights import place_weights
from brim.models.placement import resolve_device, resolve_precision
from brim.settings.train_settings import TrainSettings
from brim.training.data_sets import TrainingData, make_training_data, open_training_source
from brim.training.dense_tasks import Detection, Segmentation
from brim.training.learning_rate import scheduler_class
from brim.training.listener import TrainFacts
from brim.training.models import ModelBundle, build_model, input_kind, smaller_inputs, smallest_micro_batch
from brim.training.objective import Classification, ModelLoss, Objective, Regression
from brim.training.optimizers import optimizer_options
from brim.workloads.checkpointing import can_checkpoint, enable_gradient_checkpointing

__all__ = ["TrainingSetup", "open_setup"]

_BATCH_NORM = (
    "the model has batch normalisation: each micro-batch is normalised by its own statistics, so that accumulated "
    "micro-batches are not equivalent to one big batch"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A model on its device, with its data and its objective."""

    settings: TrainSettings
    bundle: ModelBundle
    data: TrainingData
    objective: Objective
    device: torch.device
    dtype: torch.dtype  # of the weights
    autocast: torch.dtype | None
    loss_scaling: bool
    smallest_micro_batch: int
    notes: tuple[str, ...]
    model_with_seed: Callable[[int], nn.Module]  # the same model with random weights of another seed, on the CPU

    @property
    def model(self) -> nn.Module:
        """The model, in training mode."""
        return self.bundle.model

    def identity(self) -> dict[str, Mapping[str, Any]]:
        """What the result of a run depends on, except its batch size: model, data and settings."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        settings = self.settings.to_json()
        for name in ("epochs", "max_steps", "batch_size", "effective_batch", "base_batch"):
            settings["hp"].pop(name)
        kept = ("gradient_clip", "lr_scale", "scale_betas", "fsdp")
        settings["training"] = {name: value for name, value in settings["training"].items() if name in kept}
        settings["data"].pop("num_workers")
        return {
            "model": {"name": self.bundle.name, **self.bundle.identity, "shapes": shapes},
            "data": dict(self.data.facts),
            "settings": {**settings, "dtype": str(self.autocast or self.dtype)},
        }

    def remedies(self, samples: int, *, training: bool = True) -> list[str]:
        """What to suggest where this many samples do not fit: only settings that this model has."""
        checkpoints = training and not self.settings.training.gradient_checkpointing and can_checkpoint(self.model)
        savings = memory_savings(
            half_precision="training.dtype=bfloat16" if self.autocast is None else "",
            smaller=smaller_inputs(self.settings),
            checkpointing="training.gradient_checkpointing=true" if checkpoints else "",
        )
        more = "another device with more memory (training.device), or a larger training.memory_limit"
        return memory_remedies(savings, batch_size=samples, more=more)

    def facts(self, *, epochs: int, effective_batch: int, learning_rate: float, ranks: int = 1) -> TrainFacts:
        """The facts that listeners are given when a run starts."""
        samples, validation = len(self.data.train), self.data.validation
        return TrainFacts(
            model=self.bundle.name,
            data=self.data.name,
            task=self.objective.task,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            train_samples=samples,
            validation_samples=0 if validation is None else len(validation),
            device=str(self.device),
            epochs=epochs,
            steps_per_epoch=math.ceil(samples / effective_batch),
            effective_batch=effective_batch,
            learning_rate=learning_rate,
            ranks=ranks,
            device_uuid=device_uuid(self.device),
        )


def open_setup(settings: TrainSettings) -> TrainingSetup:
    """Check optimizer and scheduler first, read the data, build the model and move it to its device."""
    optimizer_options(settings)
    scheduler_class(settings.scheduler.name)
    device = resolve_device(settings.training.device)
    double = settings.training.dtype == "float64"
    precision = resolve_precision("float32" if double else settings.training.dtype, "train")
    dtype = torch.float64 if double else torch.float32
    if double and device.type == "mps":
        raise RequestError("training.dtype float64: mps has no double precision; use cpu or float32")
    device_started = start_device(device)
    source = open_training_source(settings, input_kind(settings))
    bundle = build_model(settings, outputs=source.outputs, rows=source.rows)
    data = make_training_data(source, bundle, dtype=dtype)
    model = bundle.model
    objective = _objective(settings, data, model, source.outputs)
    notes = [*source.notes, *bundle.notes]
    _refuse_sync_batch_norm(model)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        notes.append(_BATCH_NORM)
    smallest = smallest_micro_batch(model, lambda: _first_inputs(data))
    device_started()
    place_weights(model, device, name=bundle.name, dtype=dtype).train()
    if settings.training.gradient_checkpointing:
        notes.append(enable_gradient_checkpointing(model))

    def model_with_seed(seed: int) -> nn.Module:
        reseeded = dataclasses.replace(settings, hp=dataclasses.replace(settings.hp, seed=seed))
        return build_model(reseeded, outputs=source.outputs, rows=source.rows).model.to(dtype)

    return TrainingSetup(
        settings=settings,
        bundle=bundle,
        data=data,
        objective=objective,
        device=device,
        dtype=dtype,
        autocast=precision.autocast,
        loss_scaling=precision.scaled,
        smallest_micro_batch=smallest,
        notes=tuple(notes),
        model_with_seed=model_with_seed,
    )


def _first_inputs(data: TrainingData) -> Any:
    try:
        return data.train.batch([0]).inputs
    except DataError as error:
        raise RequestError(f"training sample {data.train.ids[0]} cannot be used: {error}") from error


def _objective(settings: TrainSettings, data: TrainingData, model: nn.Module, outputs: int) -> Objective:
    if hasattr(model, "training_loss"):
        return ModelLoss()
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


def _refuse_sync_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise RequestError(
                f"model.type: {name or 'the model'} is SyncBatchNorm, which waits for other ranks in every forward; "
                "brim runs each rank's micro-batches independently, so that one rank can run out of memory and repeat "
                "them. Use BatchNorm (statistics are averaged over the ranks after each epoch), GroupNorm or LayerNorm"
            )
