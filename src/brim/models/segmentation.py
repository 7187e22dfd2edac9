"""What models that give every pixel a class share: batches, the loss, and a trial run. Knows no library by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.models.classification import build_and_try
from brim.models.parts import ModelParts, PartsRequest
from brim.workloads.random_tensors import random_floats, random_integers

__all__ = ["AUXILIARY_WEIGHT", "IGNORED", "segmentation_loss", "segmentation_parts"]

AUXILIARY_WEIGHT = 0.5  # of the side classifier, as in torchvision's reference training
IGNORED = 255  # the value of pixels without a class, such as the borders in Pascal VOC's masks


def segmentation_parts(build: Callable[[], nn.Module], size: int, request: PartsRequest, *, owner: str) -> ModelParts:
    """The parts of a model from [n, 3, size, size] to a mapping with class scores `out` [n, classes, size, size]."""
    model, trial = build_and_try(
        build, (3, size, size), request, owner=owner, run=lambda model, images: model(images)["out"]
    )
    assert trial.shape is not None
    classes, dtype = trial.shape[1], request.dtype or torch.float32

    def make_inputs(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return random_floats((count, 3, size, size), device=device, dtype=dtype)

    def make_train_batch(count: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        masks = random_integers(0, classes, (count, size, size), device=device)
        return make_inputs(count, device, dtype), masks

    return ModelParts(
        model=model.to(dtype=dtype),
        dtype=dtype,
        make_inputs=make_inputs,
        make_train_batch=make_train_batch,
        loss=segmentation_loss,
        smallest_train_size=trial.smallest_train_size,
    )


def segmentation_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy over the pixels of (images, masks); the side classifier counts half."""
    images, masks = batch
    outputs = model(images)
    loss = functional.cross_entropy(outputs["out"], masks, ignore_index=IGNORED)
    if "aux" in outputs:
        loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(outputs["aux"], masks, ignore_index=IGNORED)
    return loss
