"""What torchvision's detection models share: batches with objects in them, and the loss. Knows no library by name.

These models compute their losses themselves: in training mode they take images and targets and give losses by name, in
evaluation mode they take images alone and give boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brim.errors import RequestError
from brim.models.classification import build_and_try
from brim.models.parts import ModelParts, PartsRequest
from brim.settings.caller import given, named
from brim.workloads.random_tensors import random_floats

__all__ = ["detection_loss", "detection_parts"]

# Where the objects of every picture lie, in parts of its side: left, top, right, bottom. COCO has seven a picture on
# average; these are of all sizes, so that every level of a feature pyramid has some to find.
_BOXES = (
    (0.05, 0.05, 0.95, 0.95),
    (0.10, 0.30, 0.60, 0.80),
    (0.55, 0.10, 0.90, 0.50),
    (0.05, 0.60, 0.35, 0.95),
    (0.40, 0.45, 0.60, 0.60),
    (0.70, 0.70, 0.85, 0.80),
    (0.15, 0.10, 0.25, 0.20),
    (0.60, 0.85, 0.65, 0.95),
)
_CERTAIN = 20.0  # a class's lead in logits


def detection_parts(
    build: Callable[[], nn.Module], size: int, classes: int, request: PartsRequest, *, owner: str
) -> ModelParts:
    """The parts of a model of pictures [3, size, size], which are given to it in one tensor: it takes them one by one.

    Only the backbone is tried before the model is built: what comes after it depends on values.
    """
    if request.dtype not in (None, torch.float32):
        name = str(request.dtype).removeprefix("torch.")
        raise RequestError(
            f"{given('dtype', name)}: torchvision's box operations do not take {name} weights, which {owner} would "
            "have in a "
            f"forward; leave {named('dtype')} out (in training it means autocast, which works)"
        )
    model, trial = build_and_try(build, (3, size, size), request, owner=owner, run=_run_backbone)
    if request.mode == "forward":
        _detect_everything(model)

    def make_inputs(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return random_floats((count, 3, size, size), device=device, dtype=dtype)

    def make_train_batch(count: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any]]:
        targets = [_objects(model, size, classes, device, dtype) for _ in range(count)]
        return make_inputs(count, device, dtype), targets

    return ModelParts(
        model=model,
        dtype=torch.float32,
        make_inputs=make_inputs,
        make_train_batch=make_train_batch,
        loss=detection_loss,
        smallest_train_size=trial.smallest_train_size,
    )


def detection_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum of the losses that the model gives for (images, targets) in training mode."""
    images, targets = batch
    losses: dict[str, torch.Tensor] = model(images, targets)
    return torch.stack([loss.reshape(()) for loss in losses.values()]).sum()


def _run_backbone(model: Any, images: torch.Tensor) -> None:
    model.backbone(images)


def _detect_everything(model: Any) -> None:
    """Make every proposal an object: the worst case of what comes after the boxes (masks, keypoints).

    A model with random weights is sure of nothing, so it would find nothing, and its masks would take no memory.
    """
    heads = getattr(model, "roi_heads", None)
    if heads is not None:
        with torch.no_grad():
            heads.box_predictor.cls_score.bias[1] += _CERTAIN


def _objects(model: Any, size: int, classes: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The target of one picture: boxes in pixels, their classes, and masks or keypoints for a model that has those."""
    corners = [[round(part * size) for part in box] for box in _BOXES]
    target = {
        "boxes": torch.tensor(corners, device=device, dtype=dtype),  # [objects, 4]
        "labels": torch.tensor([1 + place % (classes - 1) for place in range(len(corners))], device=device),
    }
    heads = getattr(model, "roi_heads", None)
    if heads is not None and heads.has_mask():
        masks = torch.zeros(len(corners), size, size, dtype=torch.uint8, device=device)
        for mask, (left, top, right, bottom) in zip(masks, corners, strict=True):
            mask[top:bottom, left:right] = 1
        target["masks"] = masks
    if heads is not None and heads.has_keypoint():
        count = heads.keypoint_predictor.kps_score_lowres.out_channels
        middles = [[(left + right) / 2, (top + bottom) / 2, 1.0] for left, top, right, bottom in corners]
        points = torch.tensor(middles, device=device, dtype=dtype)  # x, y and 1 for visible
        target["keypoints"] = points[:, None].repeat(1, count, 1)  # [objects, keypoints, 3]
    return target
