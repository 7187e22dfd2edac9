"""Data of the kind `features`: rows of numbers from a file, some of them held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from brim.data.base import Sample
from brim.data.selection import stratified
from brim.errors import RequestError, plural
from brim.settings.train_settings import DataSettings, TrainSettings
from brim.training.features import Features, read_features
from brim.training.items import Items, TensorItems, labels_tensor
from brim.training.learner import Learner
from brim.training.reading import ReadData, natural_task, outputs_of, refuse_other_classes, samples_kept, task_of

__all__ = ["read_feature_data"]

HELD_OUT_SEED = 1  # the same rows whatever the run's seed: runs of a sweep are compared on them


def read_feature_data(settings: TrainSettings) -> ReadData:
    """A file of numbers."""
    data = settings.data
    assert data.root is not None
    params = dict(data.params)
    for name in params:
        if name not in ("labels", "label"):
            raise RequestError(f"data.params.{name}: features take label and labels")
    label = str(data.map.get("label") or params.get("label") or "") or None
    whole = read_features(data.root, label=label, labels_file=params.get("labels"))
    apart = read_features(data.val_root, label=label) if data.val_root else None
    task = task_of(settings, natural_task(whole.labels))
    classes = _classes(whole, apart, data) if task == "classify" else ()
    kept = _chosen_rows(whole, data)
    held_out = _held_out(kept, data) if apart is None else []
    apart_rows = set(held_out)
    training = [row for row in kept if row not in apart_rows]

    def items(features: Features, rows: Sequence[int], dtype: torch.dtype) -> TensorItems:
        labels = labels_tensor(_numbers([features.labels[row] for row in rows], classes, task), task=task, dtype=dtype)
        ids = [str(row) for row in rows] if features.ids is None else [features.ids[row] for row in rows]
        return TensorItems(features.rows[torch.tensor(rows, dtype=torch.int64)].to(dtype), labels, ids)

    def make(learner: Learner, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del learner
        if apart is not None:
            return items(whole, training, dtype), items(apart, range(len(apart)), dtype)
        return items(whole, training, dtype), items(whole, held_out, dtype) if held_out else None

    if apart is not None and apart.rows.shape[1] != whole.rows.shape[1]:
        raise RequestError(
            f"data.val_root {data.val_root}: {apart.rows.shape[1]} features a row, the training data has "
            f"{whole.rows.shape[1]}"
        )
    numbered = bool(classes) and all(isinstance(name, int) for name in classes)
    return ReadData(
        name=whole.name,
        task=task,
        outputs=outputs_of(settings, task, len(classes)),
        make=make,
        class_names=() if numbered else tuple(map(str, classes)),
        rows=whole.rows[torch.tensor(training, dtype=torch.int64)],
        facts={"format": "features", "digest": whole.digest, "validation_digest": apart.digest if apart else None},
    )


def _classes(train: Features, apart: Features | None, data: DataSettings) -> tuple[Any, ...]:
    """Numbers from 0 as they are; texts, and numbers among them, by their sorted names."""
    if not all(isinstance(label, (int, float)) for label in train.labels):
        return tuple(sorted({str(label) for label in train.labels}))
    numbers = [int(label) for label in train.labels]
    count = max(numbers, default=0) + 1
    refuse_other_classes(numbers, count, where=f"data.root {data.root}", ids=train.ids)
    if apart is not None:
        where = f"data.val_root {data.val_root}"
        texts = [label for label in apart.labels if not isinstance(label, (int, float))]
        if texts:
            raise RequestError(f"{where}: the label {texts[0]!r} is a text, and the training data has numbers")
        refuse_other_classes([int(label) for label in apart.labels], count, where=where, ids=apart.ids)
    return tuple(range(count))


def _numbers(labels: Sequence[Any], classes: tuple[Any, ...], task: str) -> list[float]:
    if task == "regress":
        wrong = [label for label in labels if isinstance(label, str)]
        if wrong:
            raise RequestError(f"task regress: the label {wrong[0]!r} is not a number")
        return [float(label) for label in labels]
    if classes and isinstance(classes[0], int):
        return [int(label) for label in labels]
    places = {name: place for place, name in enumerate(classes)}
    unknown = [label for label in labels if str(label) not in places]
    if unknown:
        raise RequestError(f"data.val_root: the class {unknown[0]!r} is not among those of the training data")
    return [places[str(label)] for label in labels]


def _chosen_rows(features: Features, data: DataSettings) -> list[int]:
    """The rows used, every class in proportion."""
    kept = samples_kept(len(features), data)
    if kept == len(features):
        return list(range(len(features)))
    grouped = [Sample(id=str(row), group=str(label)) for row, label in enumerate(features.labels)]
    return [int(sample.id) for sample in stratified(grouped, kept)]


def _held_out(rows: Sequence[int], data: DataSettings) -> list[int]:
    if data.val_split == "none" or data.val_fraction == 0:
        return []
    share = max(round(data.val_fraction * len(rows)), 1)
    if share >= len(rows):
        raise RequestError(
            f"data.root {data.root}: {plural(len(rows), 'row is', 'rows are')} too few to hold some out for validation"
        )
    chosen = np.random.default_rng(HELD_OUT_SEED).permutation(len(rows))[:share]
    return sorted(rows[place] for place in chosen.tolist())
