"""A data set that has been read but not yet joined with a model, and what every kind of it has to decide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.errors import RequestError, plural
from brim.settings.train_settings import DataSettings, TrainSettings
from brim.training.items import Items
from brim.training.learner import Learner

__all__ = ["Maker", "ReadData", "natural_task", "outputs_of", "refuse_other_classes", "samples_kept", "task_of"]

Maker = Callable[[Learner, torch.dtype], tuple[Items, Items | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadData:
    """A data set that has been read but not yet joined with a model."""

    name: str
    task: str  # classify or regress; own: the model has its own loss
    outputs: int  # of the head
    make: Maker
    class_names: tuple[str, ...] = ()
    rows: torch.Tensor | None = None  # the features that a head is made for
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def task_of(settings: TrainSettings, natural: str) -> str:
    """What the file says, else what the data is for."""
    return settings.task or natural


def outputs_of(settings: TrainSettings, task: str, classes: int) -> int:
    """As many as there are classes, or as the file says if that is not too few."""
    asked = settings.model.num_classes
    if task != "classify":
        return 1
    if asked is not None and asked < classes:
        raise RequestError(f"model.num_classes {asked}: the data has {plural(classes, 'class', 'classes')}")
    if max(asked or 0, classes) < 2:
        raise RequestError(f"the data has {classes} class; there must be 2 or more to tell apart")
    return asked or classes


def refuse_other_classes(labels: Sequence[int], classes: int, *, where: str, ids: Sequence[str] | None = None) -> None:
    """Classes are numbered from 0 to one below their number; the first label that is not is a `RequestError`."""
    for place, label in enumerate(labels):
        if not 0 <= label < classes:
            sample = str(place) if ids is None else ids[place]
            raise RequestError(
                f"{where}: the label {label} of sample {sample} is no class: they are numbered from 0 to "
                f"{classes - 1}. Number the classes from 0, leave out samples without one, or learn values with "
                "task: regress"
            )


def natural_task(labels: Sequence[Any]) -> str:
    """Classes where labels are texts or whole numbers, values otherwise."""
    return "regress" if any(isinstance(label, float) and not label.is_integer() for label in labels) else "classify"


def samples_kept(count: int, data: DataSettings) -> int:
    """How many training samples are used."""
    share = max(math.floor(count * data.percentage / 100), 1)
    return min(share, data.limit or share)
