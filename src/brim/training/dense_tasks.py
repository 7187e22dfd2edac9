"""Segmentation and detection as torchvision has them: the losses and metrics, and the data with masks or boxes.

    data: {root: streets}            # streets/train/images/1.jpg and streets/train/masks/1.png, the same under val
    data: {root: coco}               # coco/annotations/instances_train2017.json, coco/train2017/000000000009.jpg

A Python function (`data.type: py:FILE:FACTORY`) gives pairs as torchvision's data sets do: a picture [3, height, width]
with a mask [height, width], or with a target (`boxes` [objects, 4], `labels` [objects], …).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from brim.data.base import Sample, SampleSet
from brim.data.coco import read_coco
from brim.data.image_folders import read_mask_folder
from brim.data.images import load_image, load_mask, polygon_mask
from brim.errors import RequestError
from brim.models.build import resolve_model
from brim.models.vision import AUXILIARY_WEIGHT, IGNORED
from brim.settings.train_settings import TrainSettings
from brim.training.items import (
    FactoryItems,
    Items,
    TrainingSource,
    held_out_count,
    load_factory_splits,
    open_validation_split,
    samples_kept,
)
from brim.training.models import InputKind, ModelBundle, input_shape
from brim.training.moving_shapes import MovingShapes, shape_params
from brim.training.objective import Batch, LossSum, Objective
from brim.workloads.base import in_mode

__all__ = ["Detection", "Segmentation", "open_dense_data"]

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pictures, as torchvision's models want
TASKS = {"segmentation": "segment", "detection": "detect"}
FORMATS = {"segmentation": "mask_folder", "detection": "coco"}


# ------------------------------------------------------------------------------------------ losses and metrics


class Segmentation(Objective):
    """Cross entropy of the pixels, and mean intersection over union (IoU).

    Every picture has the same weight: its loss is the mean over its pixels that have a class. Intersections and unions
    are summed over all pictures before they are divided; classes that do not occur are left out of the mean.
    """

    task = "segment"
    metrics = ("loss", "mean_iou")
    higher_is_better = frozenset({"mean_iou"})

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @property
    def columns(self) -> int:
        """Loss, intersection and union of every class, weight."""
        return 2 + 2 * self.classes

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The sum over pictures; the auxiliary classifier, if the model has one, counts half."""
        assert batch.labels is not None
        outputs: Any = model(batch.inputs)
        total = _pixel_losses(outputs["out"], batch.labels).sum()
        if "aux" in outputs:
            total = total + AUXILIARY_WEIGHT * _pixel_losses(outputs["aux"], batch.labels).sum()
        return LossSum(total, float(len(batch.labels)))

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Every picture's loss, and the intersection and union of each class in pixels."""
        assert batch.labels is not None
        scores: torch.Tensor = model(batch.inputs)["out"]  # [pictures, classes, height, width]
        predicted, known = scores.argmax(dim=1), batch.labels != IGNORED
        rows = []
        for loss, answer, mask, kept in zip(
            _pixel_losses(scores, batch.labels), predicted, batch.labels, known, strict=True
        ):
            pairs = torch.bincount(mask[kept] * self.classes + answer[kept], minlength=self.classes**2)
            table = pairs.view(self.classes, self.classes).to(loss.dtype)  # [class, predicted class]
            intersection = table.diagonal()
            union = table.sum(dim=0) + table.sum(dim=1) - intersection
            rows.append(torch.cat([loss[None], intersection, union, torch.ones_like(loss)[None]]))
        return torch.stack(rows)

    def metrics_of_sums(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean loss, and the mean IoU over the classes that occur."""
        intersections, unions = sums[1 : 1 + self.classes], sums[1 + self.classes : 1 + 2 * self.classes]
        ious = [shared / union for shared, union in zip(intersections, unions, strict=True) if union > 0]
        return {"loss": sums[0] / sums[-1], "mean_iou": sum(ious) / max(len(ious), 1)}


class Detection(Objective):
    """The sum of the losses that a detection model computes from (pictures, targets).

    The model returns means over a micro-batch, which are multiplied by its pictures. Validation reports the same loss;
    there is no average precision.
    """

    task = "detect"
    metrics = ("loss",)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The losses that the model returns in training mode, added up."""
        pictures, targets = batch.inputs
        losses: dict[str, torch.Tensor] = model(pictures, targets)
        mean = torch.stack([loss.reshape(()) for loss in losses.values()]).sum()
        return LossSum(mean * len(pictures), float(len(pictures)))

    def sample_metrics(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The micro-batch's mean loss for each of its pictures."""
        pictures = batch.inputs[0]
        devices = [pictures[0].device] if pictures[0].device.type == "cuda" else []
        with _losses_in_evaluation(model), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)  # the model samples anchors at random: the same ones in every epoch
            mean = self.loss(model, batch).total.detach().float() / len(pictures)
        return torch.stack([mean, torch.ones_like(mean)]).expand(len(pictures), 2)


def _pixel_losses(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The mean loss over each picture's pixels that have a class, [pictures]."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    losses = functional.cross_entropy(scores, masks, ignore_index=IGNORED, reduction="none")  # 0 where ignored
    known = (masks != IGNORED).flatten(1).sum(dim=1).clamp(min=1)
    return losses.flatten(1).sum(dim=1) / known


@contextlib.contextmanager
def _losses_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Training mode, in which alone the model returns losses, but with batch norm and dropout in evaluation mode."""
    with in_mode(model, training=True):
        for module in model.modules():
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
                module.training = False
        yield


# ------------------------------------------------------------------------------------------ data


def open_dense_data(settings: TrainSettings, kind: InputKind) -> TrainingSource:
    """The data that the settings name; without any, moving shapes with their masks or boxes."""
    data = settings.data
    if settings.task is not None:
        raise RequestError(f"task {settings.task}: {settings.model.type} is a {kind} model; leave the task out")
    if data.type.startswith("py:"):
        return _open_factory(settings, kind, data.type.removeprefix("py:"))
    if data.type not in (FORMATS[kind], "moving_shapes", "auto"):
        raise RequestError(
            f"data.type {data.type}: a {kind} model learns from {FORMATS[kind]}, moving_shapes or py:FILE:FACTORY"
        )
    if data.root is None and data.type != FORMATS[kind]:
        return _open_shapes(settings, kind)
    if data.root is None:
        raise RequestError(f"data.root is missing: name the file or folder of the format {data.type}")
    return _open_files(settings, kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pairs(Sequence[Any]):
    """Pictures with their masks or targets, made on access."""

    length: int
    make: Callable[[int], tuple[torch.Tensor, Any]]
    ids: Sequence[str] = ()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: Any) -> Any:
        return self.make(item)


def _source(
    settings: TrainSettings, kind: InputKind, *, outputs: int, train: Any, validation: Any, **more: Any
) -> TrainingSource:
    """A data source of (picture, mask) or (picture, target) pairs."""
    asked = settings.model.num_classes
    if asked is not None and asked < outputs:
        raise RequestError(f"model.num_classes {asked}: the data has {outputs} classes, including the background")

    def items(pairs: Any) -> Items:
        ids = pairs.ids if isinstance(pairs, _Pairs) else None
        if kind == "segmentation":
            return FactoryItems(pairs, label_dtype=torch.int64, ids=ids)
        return FactoryItems(pairs, label_dtype=None, join=_join_targets, ids=ids)

    def make_items(bundle: ModelBundle, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del bundle, dtype
        return items(train), None if validation is None else items(validation)

    return TrainingSource(task=TASKS[kind], outputs=asked or outputs, make_items=make_items, **more)


def _join_targets(pairs: Sequence[Any]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A list of pictures, which may differ in size, and a list of targets."""
    return [picture for picture, _ in pairs], [target for _, target in pairs]


def _target_keys(settings: TrainSettings) -> frozenset[str]:
    """What the targets of a detection model need besides boxes and labels."""
    name = resolve_model(settings.model.type).name
    return frozenset({"maskrcnn": {"masks"}, "keypointrcnn": {"keypoints"}}.get(name.partition("_")[0], set()))


def _open_files(settings: TrainSettings, kind: InputKind) -> TrainingSource:
    train, validation = _open_splits(settings, kind)
    chosen = list(train.samples)[: samples_kept(len(train.samples), settings.data)]
    held = list(validation.samples) if validation is not None else []
    notes: tuple[str, ...] = ()
    count = held_out_count(len(chosen), settings.data, where=train.name) if validation is None else 0
    if count:
        step = len(chosen) / count
        places = {int(step * number) for number in range(count)}
        held = [sample for place, sample in enumerate(chosen) if place in places]
        chosen = [sample for place, sample in enumerate(chosen) if place not in places]
        notes = (f"there is no validation split: {count} of the training samples were held out",)
    size, target_keys = input_shape(settings)["size"], _target_keys(settings)

    def pairs(samples: list[Sample]) -> _Pairs:
        make: Any = functools.partial(_boxed, samples, target_keys)
        if kind == "segmentation":
            make = functools.partial(_masked, samples, size)
        return _Pairs(length=len(samples), make=make, ids=[sample.id for sample in samples])

    outputs = len(train.class_names) or settings.model.num_classes or _mask_classes([*chosen, *held])
    return _source(
        settings, kind, outputs=outputs, train=pairs(chosen), validation=pairs(held) if held else None,
        name=train.name, notes=notes,
        facts={"train": dict(train.facts), "validation": dict(validation.facts) if validation else None},
    )  # fmt: skip


def _open_splits(settings: TrainSettings, kind: InputKind) -> tuple[SampleSet, SampleSet | None]:
    data = settings.data
    assert data.root is not None
    of = "person_keypoints" if "keypoints" in _target_keys(settings) else "instances"

    def opened(root: str, split: str | None) -> SampleSet:
        path = Path(root).expanduser()
        if not path.exists():
            raise RequestError(f"data.root {root}: there is no such file or folder")
        if kind == "segmentation":
            return read_mask_folder(path, split=split)
        return read_coco(path, split=split, of=of)

    path = Path(data.root).expanduser()
    without_splits = (path / "images").is_dir() if kind == "segmentation" else path.is_file()
    whole = data.train_split is None and without_splits
    train = opened(data.root, None if whole else data.train_split or "train")
    if whole and data.val_root is None:
        return train, None
    return train, open_validation_split(train, opened, data)


def _masked(samples: Sequence[Sample], size: int, item: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised picture [3, size, size], and its mask [size, size]."""
    sample = samples[item]
    picture = _as_tensor(load_image(sample.images[0]).resize((size, size)))
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return (picture - mean) / deviation, torch.from_numpy(load_mask(Path(sample.original["mask"]), size)).long()


def _boxed(
    samples: Sequence[Sample], target_keys: frozenset[str], item: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The picture [3, height, width] from 0 to 1, and its target; the model resizes and normalises them."""
    sample = samples[item]
    picture = _as_tensor(load_image(sample.images[0]))
    objects = [one for one in sample.original["objects"] if _has_area(one["box"])]
    if "masks" in target_keys:
        objects = [
            one for one in objects if isinstance(one["segmentation"], list)
        ]  # polygons; other masks are of crowds
    if "keypoints" in target_keys:
        objects = [one for one in objects if one["keypoints"]]
    target = {
        "boxes": torch.tensor([one["box"] for one in objects], dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor([one["label"] for one in objects], dtype=torch.int64),
    }
    height, width = picture.shape[1:]
    if "masks" in target_keys:
        drawn = [torch.from_numpy(polygon_mask(one["segmentation"], width, height)) for one in objects]
        target["masks"] = torch.stack(drawn) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
    if "keypoints" in target_keys:
        points = [torch.tensor(one["keypoints"], dtype=torch.float32).reshape(-1, 3) for one in objects]
        target["keypoints"] = torch.stack(points) if points else torch.zeros(0, 17, 3)
    return picture, target


def _has_area(box: Sequence[float]) -> bool:
    left, top, right, bottom = box
    return right > left and bottom > top


def _as_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1).contiguous() / 255


def _mask_classes(samples: Sequence[Sample]) -> int:
    """One more than the largest class of all masks; opens every mask."""
    largest = 0
    for sample in samples:
        mask = load_mask(Path(sample.original["mask"]), None)
        largest = max(largest, int(mask[mask != IGNORED].max(initial=0)))
    return largest + 1


def _open_shapes(settings: TrainSettings, kind: InputKind) -> TrainingSource:
    """Built-in pictures of one shape each."""
    params = shape_params(settings, whole_numbers=True)
    if "keypoints" in _target_keys(settings):
        raise RequestError(f"data.root is missing: moving shapes have no keypoints for {settings.model.type}")
    classes, size, seed = params["classes"], input_shape(settings)["size"], params["seed"]
    count = samples_kept(params["samples"], settings.data)

    def pairs(number: int, seed: int) -> _Pairs:
        shapes = MovingShapes(number, classes=classes, frames=None, size=size, seed=seed)
        return _Pairs(length=number, make=functools.partial(_shape_pair, shapes, kind))

    held = params["val_samples"] if settings.data.val_split != "none" else 0
    note = f"no data was named: training on {count} built-in shapes of {classes} classes"
    return _source(
        settings, kind, outputs=classes + 1, train=pairs(count, 2 * seed),
        validation=pairs(held, 2 * seed + 1) if held else None, name="moving_shapes",
        facts={"format": "moving_shapes", **params, "size": size},
        notes=() if settings.data.type == "moving_shapes" else (note,),
    )  # fmt: skip


def _shape_pair(shapes: MovingShapes, kind: InputKind, item: int) -> tuple[torch.Tensor, Any]:
    """A picture of one shape, and its mask, or a target with its box and mask."""
    frames, inside = shapes.drawn(item)
    picture, shape = frames[:, 0], inside[0]
    label = 1 + item % len(shapes.class_names)
    if kind == "segmentation":
        return picture, shape.long() * label
    rows, columns = shape.any(dim=1).nonzero()[:, 0], shape.any(dim=0).nonzero()[:, 0]
    box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    target = {
        "boxes": torch.tensor([[float(side) for side in box]]),
        "labels": torch.tensor([label]),
        "masks": shape[None].to(torch.uint8),
    }
    return picture, target


def _open_factory(settings: TrainSettings, kind: InputKind, name: str) -> TrainingSource:
    """Pairs of a user's Python function; the number of classes must be in the settings."""
    splits = load_factory_splits(settings, name)
    if settings.model.num_classes is None:
        raise RequestError(
            f"model.num_classes is missing: with data.type py:{name}, give the number of classes of the {kind} model, "
            "including the background"
        )
    return _source(
        settings, kind, outputs=settings.model.num_classes, train=splits.train, validation=splits.validation,
        name=f"py:{name}", facts=splits.facts,
    )  # fmt: skip
