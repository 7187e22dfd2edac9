"""Files of features: rows of numbers, each with a class or a value.

features.safetensors    tensors `features` [n, d] and `labels` [n]
features.npz            the same as arrays; with .npy, the labels lie in a file of their own (data.params.labels)
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

from brim.data.csv_files import read_csv
from brim.errors import RequestError, nearest_names, plural

__all__ = ["SUFFIXES", "Features", "is_feature_file", "read_features"]

SUFFIXES = (".safetensors", ".npz", ".npy", ".csv", ".tsv")
_LABELS = ("label", "labels", "target", "class", "y")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Rows and their labels as the file has them."""

    name: str
    rows: torch.Tensor  # [n, d]
    labels: Sequence[Any]  # numbers or texts
    ids: Sequence[str] | None = None
    digest: str = ""

    def __len__(self) -> int:
        return len(self.rows)


def is_feature_file(root: str) -> bool:
    """Whether a path is surely one: tables may hold texts and pictures as well."""
    return Path(root).suffix in (".safetensors", ".npz", ".npy")


def read_features(root: str, *, label: str | None = None, labels_file: str | None = None) -> Features:
    """Read a file; rows and labels that do not go together are a `RequestError`."""
    path = Path(root).expanduser()
    if not path.is_file():
        raise RequestError(f"data.root {root}: there is no such file of features")
    if path.suffix not in SUFFIXES:
        raise RequestError(f"data.root {root}: features come in {', '.join(SUFFIXES)} files")
    if path.suffix in (".csv", ".tsv"):
        return _read_table(path, label)
    arrays = _read_arrays(path)
    rows = _named(arrays, "features", path)
    labels = _read_labels_file(labels_file) if labels_file else _named(arrays, label or "labels", path)
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


def _named(arrays: dict[str, Any], name: str, path: Path) -> Any:
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
    column = known.get(label.lower()) if label else next((known[name] for name in _LABELS if name in known), None)
    if column is None:
        wanted = label or "label"
        raise RequestError(
            f"data.root {path}: no column {wanted!r} for the labels; its columns are {', '.join(table.columns)}"
            f"{nearest_names(wanted, table.columns)}; say which with data.map.label"
        )
    numbers = [name for name in table.columns if name != column and name.lower() != "id"]
    rows = []
    for row in table.rows:
        try:
            rows.append([float(row.values[name]) for name in numbers])
        except (TypeError, ValueError):
            guilty = next(name for name in numbers if not _is_number(row.values[name]))
            raise RequestError(
                f"{row.place}: {guilty!r} is {row.values[guilty]!r}, not a number; features are numbers"
            ) from None
        if row.values[column] is None:
            raise RequestError(f"{row.place}: {column!r} is empty")
    identity = known.get("id")
    return _checked(
        Features(
            name=path.name,
            rows=torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(numbers)),
            labels=[_label(row.values[column]) for row in table.rows],
            ids=[str(row.values[identity]) for row in table.rows] if identity else None,
            digest=str(table.content.get("sha256", ""))[:16],
        ),
        path,
    )


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
            f"{int(bad.nonzero()[0])}, "
            "counting from 0); correct or leave them out"
        )
    kept = wide if wide.dtype == torch.float64 else wide.float()
    return dataclasses.replace(features, rows=kept)
