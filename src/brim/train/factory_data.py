"""Data that a Python function of the user's gives.

    def letters(count: int = 100):                  # parameters with a default are data.params
        def split(name):                            # "train", then "validation"
            return [(tensor, label), …]             # any sequence; None: no such split
        return split

Where the model has its own loss, samples may be anything that can be batched, and `split.collate` may say how.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from brim.config.train_settings import TrainSettings
from brim.errors import RequestError
from brim.models import python_factory
from brim.train.items import Items, OwnItems
from brim.train.learner import Learner
from brim.train.reading import ReadData, natural_task, outputs_of, task_of
from brim.workloads.knobs import check_knobs

__all__ = ["read_factory_data"]


def read_factory_data(settings: TrainSettings, name: str) -> ReadData:
    """Ask the function for both splits, and find out what their labels are."""
    checked = check_knobs(dict(settings.data.params), python_factory.factory_knobs(name), owner=f"py:{name}")
    split: Any = python_factory.load_function(name, knobs=checked, device=torch.device("cpu"), dtype=None)
    train, validation = split("train"), split("validation")
    if not hasattr(train, "__len__") or len(train) == 0:
        raise RequestError(f"data.type py:{name}: the training split is empty or has no length")
    task, classes = _task_and_classes(settings, train)

    def items(samples: Any, dtype: torch.dtype) -> OwnItems:
        kinds = {"own": None, "classify": torch.int64, "regress": dtype}
        return OwnItems(samples, label_dtype=kinds[task], join=getattr(split, "collate", None))

    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del learner
        return items(train, dtype), None if validation is None else items(validation, dtype)

    return ReadData(
        name=f"py:{name}",
        task=task,
        outputs=outputs_of(settings, task, classes),
        make=make,
        facts={"source": python_factory.factory_source_digest(name), "params": checked},
    )


def _task_and_classes(settings: TrainSettings, train: Any) -> tuple[str, int]:
    """What the labels are for, and how many classes there are.

    Classes are counted in `train.targets` where there is one, as torchvision's data sets have it; with
    `model.num_classes` they are not counted; else every sample is looked at.
    """
    first = train[0]
    if settings.task is None and not (isinstance(first, tuple) and len(first) == 2):
        return "own", 0
    task = task_of(settings, natural_task([_plain(first[1])]))
    if task != "classify":
        return task, 0
    if settings.model.num_classes is not None:
        return task, settings.model.num_classes
    labels = getattr(train, "targets", None)
    if labels is None:
        labels = [train[item][1] for item in range(len(train))]
    return task, 1 + max(int(label) for label in labels)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
