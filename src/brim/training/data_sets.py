"""From `data:` in a file to what is learnt from and what is validated on.

Read in two steps, since a model's head needs the classes of the data, and the data the model's way of reading:
`read_data` opens tables and counts classes, `make_items` joins them with the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from brim.errors import RequestError, nearest_names
from brim.settings.train_settings import TrainSettings
from brim.training.dense_data import read_dense_data
from brim.training.factory_data import read_factory_data
from brim.training.feature_data import read_feature_data
from brim.training.features import is_feature_file
from brim.training.items import Items
from brim.training.learner import Learner, Reads, input_shape
from brim.training.moving_shapes import MovingShapes
from brim.training.reading import ReadData, samples_kept, task_of
from brim.training.sample_data import read_sample_data

__all__ = ["TrainingData", "make_items", "read_data"]

DEFAULT_SHAPES = {"samples": 512, "val_samples": 128, "classes": 8, "noise": 0.1, "seed": 0}
FORMATS = ("auto", "moving_shapes", "features", "jsonl", "csv", "parquet", "hf", "vqav2", "image_folder", "ucf101")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What the loop runs over."""

    name: str
    task: str
    train: Items
    validation: Items | None
    class_names: tuple[str, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read_data(settings: TrainSettings, reads: Reads) -> ReadData:
    """Open the data that the settings name; without any, moving shapes for a model of pictures or clips."""
    data = settings.data
    kind = data.type
    if reads in ("segmentation", "detection"):
        return read_dense_data(settings, reads)
    if kind.startswith("py:"):
        return read_factory_data(settings, kind.removeprefix("py:"))
    if kind not in FORMATS:
        raise RequestError(
            f"data.type {kind}: there are {', '.join(FORMATS)} and py:FILE:FACTORY{nearest_names(kind, FORMATS)}"
        )
    if kind == "moving_shapes" or (data.root is None and kind == "auto" and reads in ("video", "image")):
        return _shapes(settings, reads)
    if data.root is None:
        raise RequestError(f"data.root is missing: {settings.model.type} learns from a file or folder; name it")
    if reads == "features" or kind == "features" or (kind == "auto" and is_feature_file(data.root)):
        return read_feature_data(settings)
    return read_sample_data(settings)


def make_items(read: ReadData, learner: Learner, *, dtype: torch.dtype = torch.float32) -> TrainingData:
    """Join the data with the model; an empty split is a `RequestError`."""
    train, validation = read.make(learner, dtype)
    if len(train) == 0:
        raise RequestError(f"{read.name}: the training split is empty")
    if validation is not None and len(validation) == 0:
        raise RequestError(f"{read.name}: the validation split is empty; give data.val_split: none for no validation")
    return TrainingData(
        name=read.name,
        task=read.task,
        train=train,
        validation=validation,
        class_names=read.class_names,
        facts={**read.facts, "train": len(train), "validation": 0 if validation is None else len(validation)},
        notes=read.notes,
    )


def _shapes(settings: TrainSettings, reads: Reads) -> ReadData:
    """The built-in set, cut to the model's size."""
    if reads not in ("video", "image"):
        raise RequestError(f"data.type moving_shapes: {settings.model.type} reads neither pictures nor clips")
    given = dict(settings.data.params)
    for name, value in given.items():
        if name not in DEFAULT_SHAPES:
            has = ", ".join(DEFAULT_SHAPES)
            raise RequestError(f"data.params.{name}: moving_shapes takes {has}{nearest_names(name, DEFAULT_SHAPES)}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
            raise RequestError(f"data.params.{name} {value!r}: give a number from 0")
    wanted = {**DEFAULT_SHAPES, **given}
    classes = settings.model.num_classes or int(wanted["classes"])
    shape = input_shape(settings)
    count = samples_kept(int(wanted["samples"]), settings.data)

    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del learner, dtype
        options: dict[str, Any] = {
            "classes": classes,
            "frames": shape.get("frames") if reads == "video" else None,
            "size": shape["size"],
            "noise": float(wanted["noise"]),
        }
        seed = int(wanted["seed"])
        train = MovingShapes(count, seed=2 * seed, **options)
        if settings.data.val_split == "none" or not wanted["val_samples"]:
            return train, None
        return train, MovingShapes(int(wanted["val_samples"]), seed=2 * seed + 1, **options)

    chosen = settings.data.type == "moving_shapes"
    note = f"no data was named: training on {count} built-in moving shapes of {classes} classes"
    return ReadData(
        name="moving_shapes",
        task=task_of(settings, "classify"),
        outputs=classes,
        make=make,
        facts={"format": "moving_shapes", **wanted, "classes": classes, **shape},
        notes=() if chosen else (note,),
    )
