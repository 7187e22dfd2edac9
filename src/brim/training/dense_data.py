"""Data for models of masks and boxes: pictures with a mask each, COCO's objects, moving shapes, or a Python function's.

    data: {root: streets}            # streets/train/images/1.jpg and streets/train/masks/1.png, the same under val
    data: {root: coco}               # coco/annotations/instances_train2017.json, coco/train2017/000000000009.jpg

A Python function (`data.type: py:FILE:FACTORY`) gives pairs as torchvision's data sets do: a picture [3, height, width]
with a mask [height, width], or with a target (`boxes` [objects, 4], `labels` [objects], …).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.data.base import Sample, SampleSet
from brim.data.coco import read_coco
from brim.data.image_folders import read_mask_folder
from brim.data.images import load_image, load_mask, polygon_mask
from brim.errors import RequestError
from brim.models import python_factory
from brim.models.build import resolve_model
from brim.models.vision import IGNORED
from brim.settings.train_settings import TrainSettings
from brim.training.items import Items, OwnItems
from brim.training.learner import Learner, Reads, input_shape
from brim.training.moving_shapes import SHAPES, MovingShapes
from brim.training.reading import ReadData, samples_kept
from brim.workloads.knobs import check_knobs

__all__ = ["read_dense_data"]

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pictures, as torchvision's models want
TASKS = {"segmentation": "segment", "detection": "detect"}
FORMATS = {"segmentation": "mask_folder", "detection": "coco"}
SHAPE_COUNTS = {"samples": 512, "val_samples": 128, "classes": 8, "seed": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pairs(Sequence[Any]):
    """Pictures with their answers, made when they are asked for."""

    length: int
    make: Callable[[int], tuple[torch.Tensor, Any]]
    ids: Sequence[str] = ()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: Any) -> Any:
        return self.make(item)


def read_dense_data(settings: TrainSettings, reads: Reads) -> ReadData:
    """The data that the settings name; without any, moving shapes with their masks or boxes."""
    data = settings.data
    known = (FORMATS[reads], "moving_shapes", "auto")
    if settings.task is not None:
        raise RequestError(f"task {settings.task}: {settings.model.type} is a {reads} model; leave the task out")
    if data.type.startswith("py:"):
        return _from_factory(settings, reads, data.type.removeprefix("py:"))
    if data.type not in known:
        raise RequestError(
            f"data.type {data.type}: a {reads} model learns from {FORMATS[reads]}, moving_shapes or py:FILE:FACTORY"
        )
    if data.root is None and data.type != FORMATS[reads]:
        return _shapes(settings, reads)
    if data.root is None:
        raise RequestError(f"data.root is missing: name the file or folder of the format {data.type}")
    return _from_files(settings, reads)


def _items(pairs: Any, reads: Reads) -> OwnItems:
    segments = reads == "segmentation"
    items = OwnItems(pairs, label_dtype=torch.int64 if segments else None, join=None if segments else _join_targets)
    if isinstance(pairs, _Pairs) and pairs.ids:
        items.ids = pairs.ids
    return items


def _join_targets(pairs: Sequence[Any]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Pictures of their own sizes, which the model brings to one, and their targets."""
    return [picture for picture, _ in pairs], [target for _, target in pairs]


def _read(settings: TrainSettings, reads: Reads, *, outputs: int, train: Any, validation: Any, **more: Any) -> ReadData:
    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del learner, dtype
        return _items(train, reads), None if validation is None else _items(validation, reads)

    asked = settings.model.num_classes
    if asked is not None and asked < outputs:
        raise RequestError(f"model.num_classes {asked}: the data has {outputs} classes, the background among them")
    return ReadData(task=TASKS[reads], outputs=asked or outputs, make=make, **more)


def _wanted_parts(settings: TrainSettings) -> frozenset[str]:
    """What a detection model's targets need beside boxes, by its name."""
    name = resolve_model(settings.model.type).name
    return frozenset({"maskrcnn": {"masks"}, "keypointrcnn": {"keypoints"}}.get(name.partition("_")[0], set()))


# ------------------------------------------------------------------------------------------ files


def _from_files(settings: TrainSettings, reads: Reads) -> ReadData:
    train, validation = _open_splits(settings, reads)
    chosen = list(train.samples)[: samples_kept(len(train.samples), settings.data)]
    held = list(validation.samples) if validation is not None else []
    notes: tuple[str, ...] = ()
    if validation is None and settings.data.val_split != "none" and settings.data.val_fraction > 0:
        share = max(round(settings.data.val_fraction * len(chosen)), 1)
        if share >= len(chosen):
            raise RequestError(f"{train.name}: {len(chosen)} samples are too few to hold some out for validation")
        step = len(chosen) / share
        places = {int(step * number) for number in range(share)}
        held = [sample for place, sample in enumerate(chosen) if place in places]
        chosen = [sample for place, sample in enumerate(chosen) if place not in places]
        notes = (f"there is no validation split: {share} of the training samples were held out",)
    size, parts = input_shape(settings)["size"], _wanted_parts(settings)

    def pairs(samples: list[Sample]) -> _Pairs:
        make: Any = functools.partial(_boxed, samples, parts)
        if reads == "segmentation":
            make = functools.partial(_masked, samples, size)
        return _Pairs(length=len(samples), make=make, ids=[sample.id for sample in samples])

    outputs = len(train.class_names) or settings.model.num_classes or _mask_classes([*chosen, *held])
    return _read(
        settings, reads, outputs=outputs, train=pairs(chosen), validation=pairs(held) if held else None,
        name=train.name, class_names=train.class_names, notes=notes,
        facts={"train": dict(train.facts), "validation": dict(validation.facts) if validation else None},
    )  # fmt: skip


def _open_splits(settings: TrainSettings, reads: Reads) -> tuple[SampleSet, SampleSet | None]:
    data = settings.data
    assert data.root is not None
    of = "person_keypoints" if "keypoints" in _wanted_parts(settings) else "instances"

    def opened(root: str, split: str | None) -> SampleSet:
        place = Path(root).expanduser()
        if not place.exists():
            raise RequestError(f"data.root {root}: there is no such file or folder")
        if reads == "segmentation":
            return read_mask_folder(place, split=split)
        return read_coco(place, split=split, of=of)

    place = Path(data.root).expanduser()
    unsplit = (place / "images").is_dir() if reads == "segmentation" else place.is_file()
    whole = data.train_split is None and unsplit
    train = opened(data.root, None if whole else data.train_split or "train")
    if data.val_root is not None:
        return train, opened(data.val_root, data.val_split)
    if data.val_split == "none" or whole:
        return train, None
    try:
        validation = opened(data.root, data.val_split)
    except RequestError:
        if data.val_split is not None:
            raise
        return train, None
    return train, None if validation.facts["split"] == train.facts["split"] else validation


def _masked(samples: Sequence[Sample], size: int, item: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The picture [3, size, size] as torchvision's models want it, and its mask [size, size]."""
    sample = samples[item]
    picture = _as_tensor(load_image(sample.images[0]).resize((size, size)))
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return (picture - mean) / deviation, torch.from_numpy(load_mask(Path(sample.original["mask"]), size)).long()


def _boxed(samples: Sequence[Sample], parts: frozenset[str], item: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The picture [3, height, width] from 0 to 1, and its objects; the model scales and normalises both."""
    sample = samples[item]
    picture = _as_tensor(load_image(sample.images[0]))
    objects = [
        one for one in sample.original["objects"] if one["box"][2] > one["box"][0] and one["box"][3] > one["box"][1]
    ]
    if "masks" in parts:
        objects = [one for one in objects if isinstance(one["segmentation"], list)]  # polygons; others are crowds
    if "keypoints" in parts:
        objects = [one for one in objects if one["keypoints"]]
    target = {
        "boxes": torch.tensor([one["box"] for one in objects], dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor([one["label"] for one in objects], dtype=torch.int64),
    }
    height, width = picture.shape[1:]
    if "masks" in parts:
        drawn = [torch.from_numpy(polygon_mask(one["segmentation"], width, height)) for one in objects]
        target["masks"] = torch.stack(drawn) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
    if "keypoints" in parts:
        points = [torch.tensor(one["keypoints"], dtype=torch.float32).reshape(-1, 3) for one in objects]
        target["keypoints"] = torch.stack(points) if points else torch.zeros(0, 17, 3)
    return picture, target


def _as_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1).contiguous() / 255


def _mask_classes(samples: Sequence[Sample]) -> int:
    """One more than the largest class in any mask: every mask is opened."""
    largest = 0
    for sample in samples:
        mask = load_mask(Path(sample.original["mask"]), None)
        largest = max(largest, int(mask[mask != IGNORED].max(initial=0)))
    return largest + 1


# ------------------------------------------------------------------------------------------ shapes and functions


def _shapes(settings: TrainSettings, reads: Reads) -> ReadData:
    given: Mapping[str, Any] = settings.data.params
    for name, value in given.items():
        if name not in SHAPE_COUNTS or not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RequestError(
                f"data.params.{name} {value!r}: moving shapes take whole numbers for {', '.join(SHAPE_COUNTS)}"
            )
    if "keypoints" in _wanted_parts(settings):
        raise RequestError(f"data.root is missing: moving shapes have no keypoints for {settings.model.type}")
    wanted = {**SHAPE_COUNTS, **given}
    classes, size = int(wanted["classes"]), input_shape(settings)["size"]
    count = samples_kept(int(wanted["samples"]), settings.data)

    def pairs(number: int, seed: int) -> _Pairs:
        shapes = MovingShapes(number, classes=classes, frames=None, size=size, seed=seed)
        return _Pairs(length=number, make=functools.partial(_shape_pair, shapes, reads))

    held = int(wanted["val_samples"]) if settings.data.val_split != "none" else 0
    note = f"no data was named: training on {count} built-in shapes of {classes} classes"
    return _read(
        settings, reads, outputs=classes + 1, train=pairs(count, 2 * wanted["seed"]),
        validation=pairs(held, 2 * wanted["seed"] + 1) if held else None, name="moving_shapes",
        class_names=("background", *tuple(SHAPES)[:classes]), facts={"format": "moving_shapes", **wanted, "size": size},
        notes=() if settings.data.type == "moving_shapes" else (note,),
    )  # fmt: skip


def _shape_pair(shapes: MovingShapes, reads: Reads, item: int) -> tuple[torch.Tensor, Any]:
    """A picture of one shape, and its mask, or its box with its mask."""
    frames, inside = shapes.drawn(item)
    picture, shape = frames[:, 0], inside[0]
    label = 1 + item % len(shapes.class_names)
    if reads == "segmentation":
        return picture, shape.long() * label
    rows, columns = shape.any(dim=1).nonzero()[:, 0], shape.any(dim=0).nonzero()[:, 0]
    box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    target = {
        "boxes": torch.tensor([[float(side) for side in box]]),
        "labels": torch.tensor([label]),
        "masks": shape[None].to(torch.uint8),
    }
    return picture, target


def _from_factory(settings: TrainSettings, reads: Reads, name: str) -> ReadData:
    """Pairs that a Python function gives; how many classes they have is for the file to say."""
    checked = check_knobs(dict(settings.data.params), python_factory.factory_knobs(name), owner=f"py:{name}")
    split: Any = python_factory.load_function(name, knobs=checked, device=torch.device("cpu"), dtype=None)
    train, validation = split("train"), split("validation")
    if not hasattr(train, "__len__") or len(train) == 0:
        raise RequestError(f"data.type py:{name}: the training split is empty or has no length")
    if settings.model.num_classes is None:
        raise RequestError(
            f"model.num_classes is missing: with data.type py:{name}, say how many classes the {reads} model "
            "tells apart, the background among them"
        )
    return _read(
        settings, reads, outputs=settings.model.num_classes, train=train, validation=validation, name=f"py:{name}",
        facts={"source": python_factory.factory_source_digest(name), "params": checked},
    )  # fmt: skip
