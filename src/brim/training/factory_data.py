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

from brim.errors import RequestError
from brim.models import python_factory
from brim.settings.train_settings import TrainSettings
from brim.training.items import Items, OwnItems
from brim.training.learner import Learner
from brim.training.reading import ReadData, natural_task, outputs_of, refuse_other_classes, task_of
from brim.workloads.knobs import check_knobs

__all__ = ["read_factory_data"]


def read_factory_data(settings: TrainSettings, name: str) -> ReadData:
    """Ask the function for both splits, and find out what their labels are."""
    checked = check_knobs(dict(settings.data.params), python_factory.factory_knobs(name), owner=f"py:{name}")
    split: Any = python_factory.load_function(name, knobs=checked, device=torch.device("cpu"), dtype=None)
    train, validation = split("train"), split("validation")
    if not hasattr(train, "__len__") or len(train) == 0:
        raise RequestError(f"data.type py:{name}: the training split is empty or has no length")
    task, labels = _task_and_labels(settings, train)
    classes = settings.model.num_classes or 1 + max(labels, default=-1)
    outputs = outputs_of(settings, task, classes)

    def items(samples: Any, dtype: torch.dtype, known: int | None) -> OwnItems:
        kinds = {"own": None, "classify": torch.int64, "regress": dtype}
        return OwnItems(samples, label_dtype=kinds[task], classes=known, join=getattr(split, "collate", None))

    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        known = outputs if task == "classify" and not hasattr(learner.model, "training_loss") else None
        if known is not None:
            refuse_other_classes(labels, known, where=f"data.type py:{name}")
        return items(train, dtype, known), None if validation is None else items(validation, dtype, known)

    return ReadData(
        name=f"py:{name}",
        task=task,
        outputs=outputs,
        make=make,
        facts={"source": python_factory.factory_source_digest(name), "params": checked},
    )


def _task_and_labels(settings: TrainSettings, train: Any) -> tuple[str, list[int]]:
    """What the labels are for, and the class of each sample, from which the classes are counted.

    They are read from `train.targets` where there is one, as torchvision's data sets have it; with `model.num_classes`
    they are not read ahead; else every sample is looked at.
    """
    first = train[0]
    if settings.task is None and not (isinstance(first, tuple) and len(first) == 2):
        return "own", []
    task = task_of(settings, natural_task([_plain(first[1])]))
    if task != "classify" or settings.model.num_classes is not None:
        return task, []
    labels = getattr(train, "targets", None)
    if labels is None:
        labels = [train[item][1] for item in range(len(train))]
    return task, [int(label) for label in labels]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
