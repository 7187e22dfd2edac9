"""What vision models share: worst-case batches, losses, and a run on one sample that finds bad knob values early.

For classifiers of images and videos, segmentation models (a class for each pixel) and detection models (boxes).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from brim.errors import RequestError, first_line
from brim.models.base import ModelParts, PartsRequest
from brim.models.batches import random_floats, random_integers
from brim.settings.caller import given, named, pair, written
from brim.workloads.base import call_model

__all__ = [
    "AUXILIARY_WEIGHT",
    "IGNORED",
    "SampleRun",
    "build_and_try",
    "classification_loss",
    "classifier_parts",
    "detection_loss",
    "detection_parts",
    "segmentation_loss",
    "segmentation_parts",
]

_AUX_LOGITS_WEIGHT = 0.3  # of the auxiliary classifiers of GoogLeNet and Inception, as in their papers


def classifier_parts(
    build: Callable[[], nn.Module], sample_shape: Sequence[int], request: PartsRequest, *, owner: str
) -> ModelParts:
    """The parts of a model that takes one float tensor [n, *sample_shape] and gives class scores [n, classes].

    The model is built on the meta device first and run there on one sample, so that a knob value that the
    architecture does not support is refused before its weights are created.
    """
    model, trial = build_and_try(build, sample_shape, request, owner=owner)
    dtype = request.dtype or torch.float32
    classes = trial.shape[1] if trial.shape is not None and len(trial.shape) == 2 else None
    if request.mode == "train" and classes is None:
        raise RequestError(
            f"{written('mode', 'train')}: {owner} does not give one row of class scores per sample, so there is no "
            "loss to train it on; give your own with py:FILE:FACTORY"
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
        loss = loss + _AUX_LOGITS_WEIGHT * functional.cross_entropy(other, labels)
    return loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRun:
    """What a run on one sample showed about a model."""

    shape: tuple[int, ...] | None  # of the (first) output; None: it is not a tensor
    smallest_train_size: int


def build_and_try(
    build: Callable[[], nn.Module],
    sample_shape: Sequence[int],
    request: PartsRequest,
    *,
    owner: str,
    run: Callable[[Any, torch.Tensor], Any] = call_model,
) -> tuple[nn.Module, SampleRun]:
    """The model, and the result of `run` on one sample [1, *sample_shape]; unsuitable knobs are a `RequestError`."""
    shape = tuple(sample_shape)
    training = request.mode == "train"
    trial: SampleRun | None = None
    try:
        with torch.device("meta"):
            trial = _try(build(), shape, training, run)
    except Exception:  # wrong knobs, or a model that meta tensors do not support: the real one shows which
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
) -> SampleRun:
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
    return SampleRun(
        shape=tuple(output.shape) if isinstance(output, torch.Tensor) else None, smallest_train_size=smallest
    )


def _refused(owner: str, knobs: Mapping[str, Any], error: Exception) -> RequestError:
    flags = " ".join(pair("knob", name, value) for name, value in knobs.items())
    reason = first_line(error)
    return RequestError(f"{flags}: {owner} cannot run at this: {reason}; larger values, or the defaults, may work")


AUXILIARY_WEIGHT = 0.5  # of the auxiliary classifier, as in torchvision's reference training
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
    """Cross entropy over the pixels of (images, masks); the auxiliary classifier counts half."""
    images, masks = batch
    outputs = model(images)
    loss = functional.cross_entropy(outputs["out"], masks, ignore_index=IGNORED)
    if "aux" in outputs:
        loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(outputs["aux"], masks, ignore_index=IGNORED)
    return loss


# The objects of every image, as fractions of its side: left, top, right, bottom. COCO has seven per image on
# average; these are of all sizes, so that every level of a feature pyramid has some.
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
_CERTAIN = 20.0  # added to one class's logits


def detection_parts(
    build: Callable[[], nn.Module], size: int, classes: int, request: PartsRequest, *, owner: str
) -> ModelParts:
    """The parts of a detection model of images [3, size, size], given to it in one tensor.

    Only the backbone runs on a sample before the model is built: what follows it depends on values.
    """
    if request.dtype not in (None, torch.float32):
        name = str(request.dtype).removeprefix("torch.")
        raise RequestError(
            f"{given('dtype', name)}: torchvision's box operations do not take {name} weights, which {owner} would "
            f"have in a forward; leave {named('dtype')} out (in training it means autocast, which works)"
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

    A model with random weights would detect nothing, and its masks would need no memory.
    """
    heads = getattr(model, "roi_heads", None)
    if heads is not None:
        with torch.no_grad():
            heads.box_predictor.cls_score.bias[1] += _CERTAIN


def _objects(model: Any, size: int, classes: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The target of one image: boxes in pixels, their classes, and masks or keypoints if the model has them."""
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
