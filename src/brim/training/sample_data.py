"""Data that brim reads for evaluations too: folders of pictures and clips, tables of texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from brim.data.base import Sample, SampleSet
from brim.data.open import DataRequest, open_data
from brim.data.selection import held_out, stratified
from brim.errors import RequestError, plural
from brim.settings.train_settings import TrainSettings
from brim.training.items import ImageItems, Items, TextItems, VideoItems, labels_tensor
from brim.training.learner import Learner, input_shape
from brim.training.reading import ReadData, outputs_of, refuse_other_classes, samples_kept, task_of

__all__ = ["read_sample_data"]


def read_sample_data(settings: TrainSettings) -> ReadData:
    """Anything that brim.data reads."""
    data = settings.data
    train, validation, notes = _open_splits(settings)
    if data.type not in ("auto", train.format):
        raise RequestError(f"data.type {data.type}: {data.root} is of the format {train.format}")
    task = task_of(settings, "classify")
    samples: Sequence[Sample] = train.samples
    kept = samples_kept(len(samples), data)
    if kept < len(samples):
        samples = stratified(samples, kept)
    if validation is None and data.val_split != "none" and data.val_fraction > 0:
        share = max(round(data.val_fraction * len(samples)), 1)
        if share >= len(samples):
            raise RequestError(
                f"{train.name}: {plural(len(samples), 'sample is', 'samples are')} too few to hold some out for "
                f"validation"
            )
        held = {sample.id for sample in held_out(samples, share)}
        validation = dataclasses.replace(train, samples=tuple(one for one in samples if one.id in held))
        samples = [one for one in samples if one.id not in held]
        notes = (*notes, _held_out_note(samples, validation.samples))
    classes = _class_count(train, validation) if task == "classify" else 0

    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        def joined(chosen: Sequence[Sample], owner: SampleSet) -> Items:
            values = _sample_labels(chosen, owner, train, task, classes)
            return _sample_items(learner, chosen, labels_tensor(values, task=task, dtype=dtype), settings)

        return joined(samples, train), None if validation is None else joined(validation.samples, validation)

    return ReadData(
        name=train.name,
        task=task,
        outputs=outputs_of(settings, task, classes),
        make=make,
        class_names=train.class_names,
        facts={"train": dict(train.facts), "validation": dict(validation.facts) if validation else None},
        notes=notes,
    )


def _held_out_note(training: Sequence[Sample], held: Sequence[Sample]) -> str:
    """How many samples were held out, and whether clips of one recording are all on one side."""
    were = "was" if len(held) == 1 else "were"
    note = f"there is no validation split: {len(held)} of the training samples {were} held out"
    own = {sample.recording for sample in held} - {None}
    if not own:
        return note
    apart = own.isdisjoint(sample.recording for sample in training)
    return f"{note}, {'whole groups of clips' if apart else 'and clips of one group are on both sides'}"


def _open_splits(settings: TrainSettings) -> tuple[SampleSet, SampleSet | None, tuple[str, ...]]:
    """The training split, and the validation split where the data has one."""
    data = settings.data
    task = "generate" if settings.task == "regress" else "classify"  # classes are no values

    def opened(path: str, split: str | None) -> SampleSet:
        return open_data(DataRequest(path=path, split=split, mapping=data.map, task=task, may_skip=False))

    assert data.root is not None
    wanted = data.train_split or "train"
    try:
        train = opened(data.root, wanted)
    except RequestError as error:
        if data.train_split is not None:
            raise
        train = opened(data.root, None)
        if train.facts.get("split") is not None:  # it has splits, and none for training
            raise error from None
    if data.val_root is not None:
        return train, opened(data.val_root, data.val_split), ()
    if data.val_split == "none" or train.facts.get("split") is None:
        return train, None, ()
    try:
        validation = opened(data.root, data.val_split)
    except RequestError:
        if data.val_split is not None:
            raise
        return train, None, ()
    if validation.facts.get("split") == train.facts.get("split"):
        return train, None, ()
    return train, validation, ()


def _sample_items(learner: Learner, samples: Sequence[Sample], labels: torch.Tensor, settings: TrainSettings) -> Items:
    if learner.reads == "text":
        longest = settings.hp.tokens or learner.positions
        return TextItems(samples, labels, learner.tokenizer, longest=longest)
    transform = learner.transform
    if transform is None:
        raise RequestError(
            f"model.type {settings.model.type}: it has no `transform` that turns a picture or clip into its input; "
            "give the module one, or bring the data as data.type py:FILE:FACTORY"
        )
    clips = learner.reads == "video" or (learner.reads == "own" and samples[0].video is not None)
    if not clips:
        return ImageItems(samples, labels, transform)
    frames = settings.hp.frames or (input_shape(settings)["frames"] if learner.reads == "video" else 16)
    return VideoItems(samples, labels, transform, frames=frames)


def _class_count(train: SampleSet, validation: SampleSet | None) -> int:
    sets = [train] + ([validation] if validation is not None and not validation.class_names else [])
    if train.class_names:
        return len(train.class_names)
    return 1 + max((int(sample.references[0]) for one in sets for sample in one.samples), default=0)


def _sample_labels(
    samples: Sequence[Sample], owner: SampleSet, train: SampleSet, task: str, classes: int
) -> list[float]:
    """Class numbers as the training data counts them, or the values of the label's column."""
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
