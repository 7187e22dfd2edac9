"""From `data:` in the settings to the items of a training run.

Two steps, since the model's head needs the classes of the data, and the items need the model's transform or tokenizer:
`open_training_source` reads tables and counts classes, `make_training_data` makes the items once the model is built.

Formats that `brim.data` reads and Python functions of the user are here; features, moving shapes, and the data of
segmentation and detection models have files of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from brim.data import formats
from brim.data.base import Sample, SampleSet
from brim.data.open import DataRequest, open_data
from brim.data.selection import held_out, stratified
from brim.errors import RequestError, nearest_names
from brim.settings.train_settings import TrainSettings
from brim.training.dense_tasks import open_dense_data
from brim.training.features import is_feature_file, open_features
from brim.training.items import (
    FactoryItems,
    ImageItems,
    Items,
    TextItems,
    TrainingSource,
    VideoItems,
    head_outputs,
    held_out_count,
    label_task,
    labels_tensor,
    load_factory_splits,
    open_validation_split,
    refuse_other_classes,
    samples_kept,
)
from brim.training.models import InputKind, ModelBundle, input_shape
from brim.training.moving_shapes import open_moving_shapes

__all__ = ["TrainingData", "make_training_data", "open_training_source"]

FORMATS = ("auto", "moving_shapes", "features", *(each.name for each in formats.FORMATS))
FRAMES = 16  # of a clip for a user's own model, without hp.frames


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The items of a training run; without validation, the second split is None."""

    name: str
    task: str
    train: Items
    validation: Items | None
    facts: Mapping[str, Any]


def open_training_source(settings: TrainSettings, kind: InputKind) -> TrainingSource:
    """Read the data that the settings name; without any, moving shapes for a model of pictures or clips."""
    data = settings.data
    if kind in ("segmentation", "detection"):
        return open_dense_data(settings, kind)
    if data.type.startswith("py:"):
        return _open_factory(settings, data.type.removeprefix("py:"))
    if data.type not in FORMATS:
        raise RequestError(
            f"data.type {data.type}: there are {', '.join(FORMATS)} and py:FILE:FACTORY"
            f"{nearest_names(data.type, FORMATS)}"
        )
    if data.type == "moving_shapes" or (data.root is None and data.type == "auto" and kind in ("video", "image")):
        return open_moving_shapes(settings, kind)
    if data.root is None:
        raise RequestError(f"data.root is missing: {settings.model.type} learns from a file or folder; name it")
    if kind == "features" or data.type == "features" or (data.type == "auto" and is_feature_file(data.root)):
        return open_features(settings)
    return _open_samples(settings)


def make_training_data(
    source: TrainingSource, bundle: ModelBundle, *, dtype: torch.dtype = torch.float32
) -> TrainingData:
    """The items of both splits for this model; an empty split is a `RequestError`."""
    train, validation = source.make_items(bundle, dtype)
    if len(train) == 0:
        raise RequestError(f"{source.name}: the training split is empty")
    if validation is not None and len(validation) == 0:
        raise RequestError(f"{source.name}: the validation split is empty; give data.val_split: none for no validation")
    return TrainingData(
        name=source.name,
        task=source.task,
        train=train,
        validation=validation,
        facts={**source.facts, "train": len(train), "validation": 0 if validation is None else len(validation)},
    )


# ------------------------------------------------------------------------------------------ pictures, clips, texts


def _open_samples(settings: TrainSettings) -> TrainingSource:
    """A folder of pictures or clips, or a table of texts: any format that `brim.data` reads."""
    data = settings.data
    train, validation = _open_splits(settings)
    if data.type not in ("auto", train.format):
        raise RequestError(f"data.type {data.type}: {data.root} is of the format {train.format}")
    task = settings.task or "classify"
    notes: tuple[str, ...] = ()
    samples: Sequence[Sample] = train.samples
    kept = samples_kept(len(samples), data)
    if kept < len(samples):
        samples = stratified(samples, kept)
    count = held_out_count(len(samples), data, where=train.name) if validation is None else 0
    if count:
        held = {sample.id for sample in held_out(samples, count)}
        validation = dataclasses.replace(train, samples=tuple(one for one in samples if one.id in held))
        samples = [one for one in samples if one.id not in held]
        notes = (_held_out_note(samples, validation.samples),)
    classes = _class_count(train, validation) if task == "classify" else 0

    def make_items(bundle: ModelBundle, dtype: torch.dtype) -> tuple[Items, Items | None]:
        def items(chosen: Sequence[Sample], owner: SampleSet) -> Items:
            values = _sample_labels(chosen, owner, train, task, classes)
            return _sample_items(bundle, chosen, labels_tensor(values, task=task, dtype=dtype), settings)

        return items(samples, train), None if validation is None else items(validation.samples, validation)

    return TrainingSource(
        name=train.name,
        task=task,
        outputs=head_outputs(settings, task, classes),
        make_items=make_items,
        facts={"train": dict(train.facts), "validation": dict(validation.facts) if validation else None},
        notes=notes,
    )


def _open_splits(settings: TrainSettings) -> tuple[SampleSet, SampleSet | None]:
    """The training split, and the validation split if the data has one."""
    data = settings.data
    task = "generate" if settings.task == "regress" else "classify"  # read as classes, values would be refused

    def opened(path: str, split: str | None) -> SampleSet:
        return open_data(DataRequest(path=path, split=split, mapping=data.map, task=task, may_skip=False))

    assert data.root is not None
    try:
        train = opened(data.root, data.train_split or "train")
    except RequestError as error:
        if data.train_split is not None:
            raise
        train = opened(data.root, None)
        if train.facts.get("split") is not None:  # it has splits, but none for training
            raise error from None
    return train, open_validation_split(train, opened, data)


def _held_out_note(training: Sequence[Sample], held: Sequence[Sample]) -> str:
    """How many samples were held out, and whether all clips of a recording are in the same split."""
    were = "was" if len(held) == 1 else "were"
    note = f"there is no validation split: {len(held)} of the training samples {were} held out"
    recordings = {sample.recording for sample in held} - {None}
    if not recordings:
        return note
    apart = recordings.isdisjoint(sample.recording for sample in training)
    return f"{note}, {'whole groups of clips' if apart else 'and clips of one group are in both splits'}"


def _sample_items(
    bundle: ModelBundle, samples: Sequence[Sample], labels: torch.Tensor, settings: TrainSettings
) -> Items:
    if bundle.input_kind == "text":
        longest = settings.hp.tokens or bundle.positions
        return TextItems(samples, labels, bundle.tokenizer, longest=longest)
    transform = bundle.transform
    if transform is None:
        raise RequestError(
            f"model.type {settings.model.type}: it has no `transform` that turns a picture or clip into its input; "
            "give the module one, or provide the data as data.type py:FILE:FACTORY"
        )
    video = bundle.input_kind == "video"
    items: ImageItems | VideoItems
    if not video and not (bundle.input_kind == "own" and samples[0].video is not None):
        items = ImageItems(samples, labels, transform)
    else:
        frames = settings.hp.frames or (input_shape(settings)["frames"] if video else FRAMES)
        items = VideoItems(samples, labels, transform, frames=frames)
    items.is_random = bundle.input_kind == "own"  # those of libraries draw nothing
    return items


def _class_count(train: SampleSet, validation: SampleSet | None) -> int:
    """The number of class names; without names, one more than the largest label of both splits."""
    if train.class_names:
        return len(train.class_names)
    sets = [train] + ([validation] if validation is not None and not validation.class_names else [])
    return 1 + max((int(sample.references[0]) for one in sets for sample in one.samples), default=0)


def _sample_labels(
    samples: Sequence[Sample], owner: SampleSet, train: SampleSet, task: str, classes: int
) -> list[float]:
    """Class numbers in the order of the training data's classes, or the values of the label's column."""
    if task == "regress":
        return [_value_of(sample, owner) for sample in samples]
    numbers = [int(sample.references[0]) for sample in samples]
    if not owner.class_names or owner.class_names == train.class_names:
        refuse_other_classes(numbers, classes, ids=[sample.id for sample in samples], where=owner.name)
        return [float(number) for number in numbers]
    places = {name: place for place, name in enumerate(train.class_names)}
    names = [owner.class_names[number] for number in numbers]
    unknown = [name for name in names if name not in places]
    if unknown:
        raise RequestError(f"{owner.name}: the class {unknown[0]!r} is not among those of the training data")
    return [float(places[name]) for name in names]


def _value_of(sample: Sample, owner: SampleSet) -> float:
    column = owner.fields.get("label") or owner.fields.get("reference")
    raw = sample.original.get(column) if column else None
    try:
        value = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(f"task regress: {sample.id} has {raw!r} in {column!r}, which is not a number")
    return value


# ------------------------------------------------------------------------------------------ a function of the user


def _open_factory(settings: TrainSettings, name: str) -> TrainingSource:
    """Samples of a Python function.

        def letters(count: int = 100):                  # parameters with a default are data.params
            def split(name):                            # "train", then "validation"
                return [(tensor, label), …]             # any sequence; None: no such split
            return split

    Where the model computes its own loss, samples may be anything; `split.collate` may join them to a batch.
    """
    splits = load_factory_splits(settings, name)
    task, labels = _task_and_labels(settings, splits.train)
    classes = settings.model.num_classes or 1 + max(labels, default=-1)
    outputs = head_outputs(settings, task, classes)

    def items(samples: Any, dtype: torch.dtype, known: int | None) -> FactoryItems:
        dtypes = {"own": None, "classify": torch.int64, "regress": dtype}
        return FactoryItems(samples, label_dtype=dtypes[task], classes=known, join=splits.collate)

    def make_items(bundle: ModelBundle, dtype: torch.dtype) -> tuple[Items, Items | None]:
        known = outputs if task == "classify" and not hasattr(bundle.model, "training_loss") else None
        if known is not None:
            refuse_other_classes(labels, known, where=f"data.type py:{name}")
        validation = None if splits.validation is None else items(splits.validation, dtype, known)
        return items(splits.train, dtype, known), validation

    return TrainingSource(name=f"py:{name}", task=task, outputs=outputs, make_items=make_items, facts=splits.facts)


def _task_and_labels(settings: TrainSettings, train: Any) -> tuple[str, list[int]]:
    """The task, and for classification the label of every sample, from which the classes are counted.

    Labels are read from `train.targets` where it exists, as in torchvision's data sets, else from every sample; with
    `model.num_classes` they are not read.
    """
    first = train[0]
    if settings.task is None and not (isinstance(first, tuple) and len(first) == 2):
        return "own", []
    task = settings.task or label_task([_python_number(first[1])])
    if task != "classify" or settings.model.num_classes is not None:
        return task, []
    labels = getattr(train, "targets", None)
    if labels is None:
        labels = [train[item][1] for item in range(len(train))]
    return task, [int(label) for label in labels]


def _python_number(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
