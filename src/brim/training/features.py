"""Training on features: files with rows of numbers, each with a class or a value, some of them held out.

features.safetensors    tensors `features` [n, d] and `labels` [n]
features.npz            the same as arrays; with .npy, the labels are in another file (data.params.labels)
features.csv, .tsv      a column `label` (or data.map.label), an optional `id`, and columns of numbers
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.data.base import Sample
from brim.data.csv_files import read_csv
from brim.data.selection import stratified
from brim.errors import RequestError, nearest_names, plural
from brim.settings.train_settings import DataSettings, TrainSettings
from brim.training.items import (
    Items,
    TensorItems,
    TrainingSource,
    head_outputs,
    held_out_count,
    label_task,
    labels_tensor,
    refuse_other_classes,
    samples_kept,
)
from brim.training.models import ModelBundle

__all__ = ["Features", "is_feature_file", "open_features", "read_feature_file"]

ARRAY_SUFFIXES = (".safetensors", ".npz", ".npy")
TABLE_SUFFIXES = (".csv", ".tsv")
SUFFIXES = (*ARRAY_SUFFIXES, *TABLE_SUFFIXES)
HELD_OUT_SEED = 1  # whatever the run's seed, so that the runs of a sweep are compared on the same rows
_LABEL_COLUMNS = ("label", "labels", "target", "class", "y")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """The rows and labels of a file."""

    name: str
    rows: torch.Tensor  # [n, d]
    labels: Sequence[Any]  # numbers or texts
    ids: Sequence[str] | None = None
    digest: str = ""

    def __len__(self) -> int:
        return len(self.rows)


def is_feature_file(root: str) -> bool:
    """Whether a path can only be a file of features; a table may hold texts or pictures as well."""
    return Path(root).suffix in ARRAY_SUFFIXES


# ------------------------------------------------------------------------------------------ as a data source


def open_features(settings: TrainSettings) -> TrainingSource:
    """The file of features that the settings name, and its validation rows."""
    data = settings.data
    assert data.root is not None
    params = dict(data.params)
    for name in params:
        if name not in ("labels", "label"):
            raise RequestError(f"data.params.{name}: features take label and labels")
    label = str(data.map.get("label") or params.get("label") or "") or None
    whole = read_feature_file(data.root, label=label, labels_file=params.get("labels"))
    validation = read_feature_file(data.val_root, label=label) if data.val_root else None
    if validation is not None and validation.rows.shape[1] != whole.rows.shape[1]:
        raise RequestError(
            f"data.val_root {data.val_root}: {validation.rows.shape[1]} features a row, the training data has "
            f"{whole.rows.shape[1]}"
        )
    task = settings.task or label_task(whole.labels)
    classes = _classes(whole, validation, data) if task == "classify" else ()
    kept = _rows_kept(whole, data)
    held_out = _rows_held_out(kept, data) if validation is None else []
    held_out_set = set(held_out)
    training = [row for row in kept if row not in held_out_set]

    def items(features: Features, rows: Sequence[int], dtype: torch.dtype) -> TensorItems:
        labels = labels_tensor(
            _label_numbers([features.labels[row] for row in rows], classes, task), task=task, dtype=dtype
        )
        ids = [str(row) for row in rows] if features.ids is None else [features.ids[row] for row in rows]
        return TensorItems(features.rows[torch.tensor(rows, dtype=torch.int64)].to(dtype), labels, ids)

    def make_items(bundle: ModelBundle, dtype: torch.dtype) -> tuple[Items, Items | None]:
        del bundle
        if validation is not None:
            return items(whole, training, dtype), items(validation, range(len(validation)), dtype)
        return items(whole, training, dtype), items(whole, held_out, dtype) if held_out else None

    return TrainingSource(
        name=whole.name,
        task=task,
        outputs=head_outputs(settings, task, len(classes)),
        make_items=make_items,
        rows=whole.rows[torch.tensor(training, dtype=torch.int64)],
        facts={
            "format": "features",
            "digest": whole.digest,
            "validation_digest": validation.digest if validation else None,
        },
    )


def _classes(train: Features, validation: Features | None, data: DataSettings) -> tuple[Any, ...]:
    """The classes in their order: 0, 1, 2, … where all labels are numbers, else their sorted texts."""
    if not all(isinstance(label, (int, float)) for label in train.labels):
        return tuple(sorted({str(label) for label in train.labels}))
    numbers = [int(label) for label in train.labels]
    count = max(numbers, default=0) + 1
    refuse_other_classes(numbers, count, where=f"data.root {data.root}", ids=train.ids)
    if validation is not None:
        where = f"data.val_root {data.val_root}"
        texts = [label for label in validation.labels if not isinstance(label, (int, float))]
        if texts:
            raise RequestError(f"{where}: the label {texts[0]!r} is a text, and the training data has numbers")
        refuse_other_classes([int(label) for label in validation.labels], count, where=where, ids=validation.ids)
    return tuple(range(count))


def _label_numbers(labels: Sequence[Any], classes: tuple[Any, ...], task: str) -> list[float]:
    """Labels as the numbers of their classes, or as values."""
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


def _rows_kept(features: Features, data: DataSettings) -> list[int]:
    """The rows that are used: of a part of the data, the same share of every class."""
    kept = samples_kept(len(features), data)
    if kept == len(features):
        return list(range(len(features)))
    grouped = [Sample(id=str(row), group=str(label)) for row, label in enumerate(features.labels)]
    return [int(sample.id) for sample in stratified(grouped, kept)]


def _rows_held_out(rows: Sequence[int], data: DataSettings) -> list[int]:
    count = held_out_count(len(rows), data, where=f"data.root {data.root}", noun="row")
    if count == 0:
        return []
    chosen = np.random.default_rng(HELD_OUT_SEED).permutation(len(rows))[:count]
    return sorted(rows[place] for place in chosen.tolist())


# ------------------------------------------------------------------------------------------ files


def read_feature_file(root: str, *, label: str | None = None, labels_file: str | None = None) -> Features:
    """Read a file; anything but one label for every row of numbers is a `RequestError`."""
    path = Path(root).expanduser()
    if not path.is_file():
        raise RequestError(f"data.root {root}: there is no such file of features")
    if path.suffix not in SUFFIXES:
        raise RequestError(f"data.root {root}: features come in {', '.join(SUFFIXES)} files")
    if path.suffix in TABLE_SUFFIXES:
        return _read_table(path, label)
    arrays = _read_arrays(path)
    rows = _named_array(arrays, "features", path)
    labels = _read_labels_file(labels_file) if labels_file else _named_array(arrays, label or "labels", path)
    features = Features(
        name=path.name,
        rows=torch.from_numpy(np.ascontiguousarray(rows)),
        labels=labels.tolist(),
        digest=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    )
    return _checked(features, path)


def _read_arrays(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
        loaded = np.load(path, allow_pickle=False)
        return {"features": loaded} if path.suffix == ".npy" else {name: loaded[name] for name in loaded.files}
    except Exception as error:
        raise RequestError(f"data.root {path}: it cannot be read as {path.suffix} ({error})") from error


def _read_labels_file(name: str) -> Any:
    try:
        return np.load(Path(name).expanduser(), allow_pickle=False)
    except Exception as error:
        raise RequestError(f"data.params.labels {name}: it cannot be read as .npy ({error})") from error


def _named_array(arrays: dict[str, Any], name: str, path: Path) -> Any:
    if name not in arrays:
        hint = "; give the labels' file with data.params.labels" if path.suffix == ".npy" else ""
        has = ", ".join(arrays) or "nothing"
        raise RequestError(f"data.root {path}: it has no {name!r}, but {has}{nearest_names(name, arrays)}{hint}")
    return arrays[name]


def _read_table(path: Path, label: str | None) -> Features:
    table = read_csv(path)
    if table.bad:
        raise RequestError(f"{table.bad[0].place}: {table.bad[0].reason}; correct the file")
    known = {column.lower(): column for column in table.columns}
    label_column = _label_column(known, table.columns, label, path)
    columns = [name for name in table.columns if name != label_column and name.lower() != "id"]
    rows = []
    for row in table.rows:
        try:
            rows.append([float(row.values[name]) for name in columns])
        except (TypeError, ValueError):
            wrong = next(name for name in columns if not _is_number(row.values[name]))
            raise RequestError(
                f"{row.place}: {wrong!r} is {row.values[wrong]!r}, not a number; features are numbers"
            ) from None
        if row.values[label_column] is None:
            raise RequestError(f"{row.place}: {label_column!r} is empty")
    id_column = known.get("id")
    features = Features(
        name=path.name,
        rows=torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(columns)),
        labels=[_label(row.values[label_column]) for row in table.rows],
        ids=[str(row.values[id_column]) for row in table.rows] if id_column else None,
        digest=str(table.content.get("sha256", ""))[:16],
    )
    return _checked(features, path)


def _label_column(known: dict[str, str], columns: Sequence[str], label: str | None, path: Path) -> str:
    """The column of the labels: the one that was asked for, or the first with a usual name."""
    if label:
        column = known.get(label.lower())
    else:
        column = next((known[name] for name in _LABEL_COLUMNS if name in known), None)
    if column is None:
        wanted = label or "label"
        raise RequestError(
            f"data.root {path}: no column {wanted!r} for the labels; its columns are {', '.join(columns)}"
            f"{nearest_names(wanted, columns)}; name it with data.map.label"
        )
    return column


def _label(text: Any) -> Any:
    """A whole number, a number, or the text itself."""
    if not _is_number(text):
        return str(text).strip()
    value = float(text)
    return int(value) if value.is_integer() and "." not in str(text) and "e" not in str(text).lower() else value


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def _checked(features: Features, path: Path) -> Features:
    """The features with rows of float32 or float64; wrong shapes and values are a `RequestError`."""
    rows, labels = features.rows, features.labels
    if rows.dim() != 2:
        raise RequestError(
            f"data.root {path}: features have the shape {tuple(rows.shape)}; it must be [samples, features]"
        )
    if len(rows) != len(labels):
        raise RequestError(
            f"data.root {path}: {plural(len(rows), 'row')} of features and {plural(len(labels), 'label')}; each "
            f"row must have one label"
        )
    if len(rows) == 0:
        raise RequestError(f"data.root {path}: it has no rows")
    if any(isinstance(label, list) for label in labels):
        raise RequestError(f"data.root {path}: a label must be one class or one number, not a row of them")
    wide = rows if rows.is_floating_point() else rows.float()
    bad = ~torch.isfinite(wide).all(dim=1)
    if bad.any():
        raise RequestError(
            f"data.root {path}: {plural(int(bad.sum()), 'row has', 'rows have')} NaN or infinity (the first is row "
            f"{int(bad.nonzero()[0])}, counting from 0); correct or leave them out"
        )
    kept = wide if wide.dtype == torch.float64 else wide.float()
    return dataclasses.replace(features, rows=kept)
