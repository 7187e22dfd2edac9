"""What image and video classifiers share: batches, the loss, and a trial run that finds bad knob values early."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError, first_line
from brim.models.parts import ModelParts, PartsRequest
from brim.settings.caller import pair, written
from brim.workloads.model_call import call_model
from brim.workloads.random_tensors import random_floats, random_integers

__all__ = ["Trial", "build_and_try", "classification_loss", "classifier_parts"]

_AUXILIARY_WEIGHT = 0.3  # of the side classifiers of GoogLeNet and Inception, as in their papers


def classifier_parts(
    build: Callable[[], nn.Module], sample_shape: Sequence[int], request: PartsRequest, *, owner: str
) -> ModelParts:
    """The parts of a model that takes one float tensor [n, *sample_shape] and gives class scores [n, classes].

    The model is built on the meta device first and run there on one sample, so that a knob value the architecture
    cannot take is refused before its weights are made.
    """
    model, trial = build_and_try(build, sample_shape, request, owner=owner)
    dtype = request.dtype or torch.float32
    classes = trial.shape[1] if trial.shape is not None and len(trial.shape) == 2 else None
    if request.mode == "train" and classes is None:
        raise RequestError(
            f"{written('mode', 'train')}: {owner} does not give one row of class scores per sample, so there is no "
            "loss to train it "
            "on; give your own with py:FILE:FACTORY"
        )

    def make_inputs(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return random_floats((size, *sample_shape), device=device, dtype=dtype)

    def make_train_batch(size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return make_inputs(size, device, dtype), random_integers(0, classes or 1, (size,), device=device)

    return ModelParts(
        model=model.to(dtype=dtype),
        dtype=dtype,
        make_inputs=make_inputs,
        make_train_batch=make_train_batch,
        loss=classification_loss,
        smallest_train_size=trial.smallest_train_size,
        identity={} if classes is None else {"classes": classes},
    )


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of (inputs, labels); further outputs (auxiliary classifiers) are added at a smaller weight."""
    inputs, labels = batch
    outputs = model(inputs)
    if isinstance(outputs, torch.Tensor):
        return functional.cross_entropy(outputs, labels)
    main, *others = [output for output in outputs if output is not None]
    loss = functional.cross_entropy(main, labels)
    for other in others:
        loss = loss + _AUXILIARY_WEIGHT * functional.cross_entropy(other, labels)
    return loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What a run on one sample showed."""

    shape: tuple[int, ...] | None  # of the output, the main one of several; None: it is no tensor
    smallest_train_size: int


def build_and_try(
    build: Callable[[], nn.Module],
    sample_shape: Sequence[int],
    request: PartsRequest,
    *,
    owner: str,
    run: Callable[[Any, torch.Tensor], Any] = call_model,
) -> tuple[nn.Module, Trial]:
    """The model, and what `run` gives on one sample [1, *sample_shape]; knobs it cannot take are a `RequestError`."""
    shape = tuple(sample_shape)
    training = request.mode == "train"
    trial: Trial | None = None
    try:
        with torch.device("meta"):
            trial = _try(build(), shape, training, run)
    except Exception:  # the knobs are wrong, or meta tensors are not enough for this model: the real one tells which
        trial = None
    try:
        model = build()
        if trial is None:
            with torch.random.fork_rng(devices=[]):
                trial = _try(copy.deepcopy(model), shape, training, run)
    except Exception as error:
        raise _refused(owner, request.knobs, error) from error
    return model, trial


def _try(
    model: nn.Module, sample_shape: tuple[int, ...], training: bool, run: Callable[[Any, torch.Tensor], Any]
) -> Trial:
    model.train(training)
    smallest = 1
    with torch.no_grad():
        try:
            output = run(model, torch.zeros(1, *sample_shape))
        except ValueError:  # batch normalisation refuses a single value per channel, in training only
            if not training:
                raise
            smallest = 2
            output = run(model, torch.zeros(2, *sample_shape))
    if isinstance(output, (tuple, list)):
        output = output[0]
    return Trial(shape=tuple(output.shape) if isinstance(output, torch.Tensor) else None, smallest_train_size=smallest)


def _refused(owner: str, knobs: Mapping[str, Any], error: Exception) -> RequestError:
    flags = " ".join(pair("knob", name, value) for name, value in knobs.items())
    reason = first_line(error)
    return RequestError(f"{flags}: {owner} cannot run at this: {reason}; larger values, or the defaults, may work")
