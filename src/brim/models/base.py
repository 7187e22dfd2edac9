"""What every source of models provides: parts for a workload, or a model ready to evaluate. Knows no library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from brim.errors import RequestError, plural
from brim.memory.weights import place_weights
from brim.models.placement import Precision
from brim.records import Mode
from brim.settings.caller import written
from brim.workloads.base import Workload
from brim.workloads.checkpointing import enable_gradient_checkpointing
from brim.workloads.inference import ForwardWorkload, GenerateWorkload
from brim.workloads.optimizers import make_optimizer
from brim.workloads.train_step import TrainStepWorkload

__all__ = [
    "BatchMaker",
    "LoadRequest",
    "LoadedModel",
    "Loss",
    "ModelKind",
    "ModelParts",
    "PartsRequest",
    "Setup",
    "assemble",
]

ModelKind = Literal[
    "language", "seq2seq", "vision_language", "text_classifier", "image_classifier", "video_classifier", "function"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Which model, where, and how precise; `weights` is auto (the published ones), none (random) or a file."""

    model: str
    device: torch.device
    dtype: torch.dtype | None = None  # None: the model's own
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: str = "auto"
    classes: int | None = None  # outputs of a classifier, where a file of weights has another number of them
    trust_remote_code: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model in evaluation mode, with its tokenizer, processor or transform.

    `transform` turns a decoded image or clip into one input tensor; it and `tokenizer`, `processor` run in worker
    processes. `module` is a plain function for the kind `function`: samples in, answers out.
    """

    name: str
    kind: ModelKind
    module: Any
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any = None
    processor: Any = None
    transform: Callable[[Any], torch.Tensor] | None = None
    class_names: tuple[str, ...] = ()
    frames: int | None = None  # in a clip
    positions: int | None = None  # tokens that prompt and answer may have together
    processor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every call, from its knobs
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


BatchMaker = Callable[[int, torch.device, torch.dtype], Any]  # size, device, dtype of floating-point inputs
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartsRequest:
    """A model by its name in a source, with checked knobs, to build a workload of."""

    name: str
    knobs: Mapping[str, Any]
    mode: Mode
    dtype: torch.dtype | None = None  # None: the model's own
    trust_remote_code: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model on the CPU in its dtype, with worst-case batches and a loss for it."""

    model: nn.Module
    dtype: torch.dtype
    make_inputs: BatchMaker
    make_train_batch: BatchMaker
    loss: Loss
    max_new_tokens: int | None = None  # None: it cannot generate
    smallest_train_size: int = 1
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """How to run the parts."""

    mode: Mode
    device: torch.device
    precision: Precision
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False


def assemble(parts: ModelParts, setup: Setup, identity: Mapping[str, Any]) -> tuple[Workload, tuple[str, ...]]:
    """The workload of these parts on the device asked for, and notes for the user."""
    model = place_weights(parts.model, setup.device, name=str(identity.get("model", "the model")))
    identity = {
        **identity,
        **parts.identity,
        "mode": setup.mode,
        "dtype": _name(setup.precision.autocast or parts.dtype),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if setup.mode == "train":
        return _train(parts, setup, identity)
    model.eval()

    def make_batch(size: int) -> Any:
        return parts.make_inputs(size, setup.device, parts.dtype)

    if setup.mode == "forward":
        forward = ForwardWorkload(model=model, make_batch=make_batch, device=setup.device, identity=identity)
        return forward, parts.notes
    if parts.max_new_tokens is None:
        raise RequestError(
            f"{written('mode', 'generate')}: {identity.get('model')} does not generate; use "
            f"{written('mode', 'forward')} or train"
        )
    generate = GenerateWorkload(
        model=model,
        make_batch=make_batch,
        max_new_tokens=parts.max_new_tokens,
        device=setup.device,
        identity=identity,
    )
    return generate, parts.notes


def _train(parts: ModelParts, setup: Setup, identity: Mapping[str, Any]) -> tuple[Workload, tuple[str, ...]]:
    notes = parts.notes
    model = parts.model.train()
    if setup.gradient_checkpointing:
        notes = (*notes, enable_gradient_checkpointing(model))
    if parts.smallest_train_size > 1:
        smallest = parts.smallest_train_size
        notes = (*notes, f"batch normalisation needs at least {plural(smallest, 'sample')} in training at these knobs")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    workload = TrainStepWorkload(
        model=model,
        make_batch=lambda size: parts.make_train_batch(size, setup.device, parts.dtype),
        loss=parts.loss,
        optimizer=make_optimizer(setup.optimizer, trainable),
        device=setup.device,
        autocast_dtype=setup.precision.autocast,
        scaler=torch.amp.GradScaler(setup.device.type) if setup.precision.scaled else None,
        identity={
            **identity,
            "optimizer": setup.optimizer.lower(),
            "gradient_checkpointing": setup.gradient_checkpointing,
        },
        smallest_size=parts.smallest_train_size,
        repeats=True,
    )
    return workload, notes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
