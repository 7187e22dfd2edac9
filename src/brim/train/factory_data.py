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
from brim.train.items import Items, OwnItems, labels_tensor
from brim.train.learner import Learner
from brim.train.reading import ReadData, natural_task, outputs_of, task_of
from brim.workloads.knobs import check_knobs

__all__ = ["read_factory_data"]


def read_factory_data(settings: TrainSettings, name: str) -> ReadData:
    """A function of the user's: called with train, then validation, it gives a sequence of samples or None."""
    checked = check_knobs(dict(settings.data.params), python_factory.factory_knobs(name), owner=f"py:{name}")
    split: Any = python_factory.load_function(name, knobs=checked, device=torch.device("cpu"), dtype=None)
    train, validation = split("train"), split("validation")
    if not hasattr(train, "__len__") or len(train) == 0:
        raise RequestError(f"data.type py:{name}: the training split is empty or has no length")
    own = settings.task is None and not _is_pair(train[0])
    values = [] if own else [sample[1] for sample in train]
    task = "own" if own else task_of(settings, natural_task([_plain(value) for value in values]))
    classes = 0 if task != "classify" else 1 + max(int(value) for value in values)

    def items(samples: Any, dtype: torch.dtype) -> OwnItems:
        labels = None if own else labels_tensor([_plain(one[1]) for one in samples], task=task, dtype=dtype)
        return OwnItems(samples, labels, getattr(split, "collate", None))

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


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
