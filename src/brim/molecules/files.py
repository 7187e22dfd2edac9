"""Files of molecules and of features.

SMILES in `.csv`, `.tsv`, `.smi` or `.txt` files and DrugOOD-style files of splits, as lists of molecules that know
their file and line; features in safetensors files, one row a sample in the tensor `features`. Rows without any SMILES
are left out and named; whether RDKit accepts a molecule is not checked here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.data.base import BadRecord
from brim.data.csv_files import read_csv
from brim.data.files import decoded, inner_suffix, read_content, text_digest
from brim.errors import RequestError, nearest_names
from brim.settings.caller import pair, written
from brim.storage.files import write_atomic

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "JSON_SPLITS", "Molecules", "SplitFile", "file_digest", "read_arrays", "read_metadata", "read_smiles",
    "read_splits", "write_arrays",
]  # fmt: skip

_SMILES_NAMES = ("smiles", "canonical_smiles", "isomeric_smiles", "mol", "molecule")
_LABEL_NAMES = ("cls_label", "label", "labels", "class", "y")
JSON_SPLITS = ("train", "iid_val", "iid_test", "ood_val", "ood_test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Molecules:
    """SMILES in the order of their file, each with its file and line."""

    smiles: tuple[str, ...]
    places: tuple[str, ...]  # `in.csv line 7`, `a.json train[3]`
    lines: tuple[int, ...] = ()  # of a text file, from 1
    labels: tuple[Any, ...] | None = None
    bad: tuple[BadRecord, ...] = ()
    digest: str = ""  # of the file's content

    def __len__(self) -> int:
        return len(self.smiles)

    def chosen(self, rows: Sequence[int]) -> Molecules:
        """These rows only, in this order."""
        return dataclasses.replace(
            self,
            smiles=tuple(self.smiles[row] for row in rows),
            places=tuple(self.places[row] for row in rows),
            lines=tuple(self.lines[row] for row in rows) if self.lines else (),
            labels=None if self.labels is None else tuple(self.labels[row] for row in rows),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitFile:
    """A DrugOOD-style file: molecules by the name of their split."""

    splits: Mapping[str, Molecules]
    digest: str


def read_smiles(path: Path, mapping: Mapping[str, str] | None = None) -> Molecules:
    """Molecules of a `.csv` or `.tsv` file with a header, or of a `.smi` or `.txt` file with one SMILES a line.

    `mapping` names the columns of `smiles` and `label` where they are called otherwise. All may be packed with gzip.
    """
    mapping = mapping or {}
    for field in mapping:
        if field not in ("smiles", "label"):
            raise RequestError(f"{pair('map', field, mapping[field])}: here it must be smiles=COLUMN or label=COLUMN")
    suffix = inner_suffix(path)
    if suffix in (".csv", ".tsv"):
        return _from_table(path, mapping)
    if suffix in (".smi", ".smiles", ".txt"):
        return _from_lines(path)
    raise RequestError(f"{path}: molecules come as .csv, .tsv, .smi or .txt; features as .safetensors")


def read_splits(path: Path) -> SplitFile:
    """The splits of a DrugOOD-style JSON file, `{"split": {"train": [{"smiles": …}, …], …}}`."""
    content = read_content(path)
    try:
        document = json.loads(decoded(content, path))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    split = document.get("split") if isinstance(document, dict) else None
    if not isinstance(split, dict):
        raise RequestError(f'{path} has no "split": it must look like {{"split": {{"train": [{{"smiles": …}}], …}}}}')
    missing = [name for name in JSON_SPLITS if name not in split]
    if missing:
        raise RequestError(f"{path}: split {missing[0]!r} is missing; it has {', '.join(map(repr, split)) or 'none'}")
    found = {name: _from_records(path, name, records) for name, records in split.items()}
    empty = [name for name in JSON_SPLITS if not len(found[name])]
    if empty:
        raise RequestError(f"{path}: split {empty[0]!r} is empty; every one of {', '.join(JSON_SPLITS)} is needed")
    return SplitFile(splits=found, digest=text_digest([content]))


def _from_table(path: Path, mapping: Mapping[str, str]) -> Molecules:
    table = read_csv(path)
    column = _column(path, table.columns, "smiles", mapping, _SMILES_NAMES)
    if column is None and len(table.columns) == 1:
        column = table.columns[0]
    if column is None:
        raise RequestError(
            f"{path} has no column of SMILES among {', '.join(table.columns)}; name it with "
            f"{written('map', 'smiles=COLUMN')}"
        )
    label = _column(path, table.columns, "label", mapping, _LABEL_NAMES)
    rows = [row for row in table.rows if row.values[column] is not None]
    absent = [
        BadRecord(place=row.place, reason="there is no SMILES") for row in table.rows if row.values[column] is None
    ]
    if not rows:
        raise RequestError(f"{path} holds no molecules: column {column} is empty")
    labels = tuple(row.values.get(label) for row in rows) if label is not None else None
    return Molecules(
        smiles=tuple(str(row.values[column]).strip() for row in rows),
        places=tuple(row.place for row in rows),
        lines=tuple(row.number for row in rows),
        labels=labels if labels is not None and None not in labels else None,
        bad=(*table.bad, *absent),
        digest=str(table.content["sha256"]),
    )


def _column(
    path: Path, columns: Sequence[str], field: str, mapping: Mapping[str, str], usual: Sequence[str]
) -> str | None:
    asked = mapping.get(field)
    if asked is not None:
        if asked not in columns:
            near = nearest_names(asked, columns)
            raise RequestError(f"{pair('map', field, asked)}: {path} has the columns {', '.join(columns)}{near}")
        return asked
    lowered = {name.lower(): name for name in reversed(columns)}
    return next((lowered[name] for name in usual if name in lowered), None)


def _from_lines(path: Path) -> Molecules:
    """The first word of each line: what follows a SMILES in such files is its name."""
    content = read_content(path)
    lines = decoded(content, path).splitlines()
    found = [(number, line.split()[0]) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise RequestError(f"{path} holds no molecules")
    return Molecules(
        smiles=tuple(text for _, text in found),
        places=tuple(f"{path.name} line {number}" for number, _ in found),
        lines=tuple(number for number, _ in found),
        digest=text_digest([content]),
    )


def _from_records(path: Path, split: str, records: Any) -> Molecules:
    if not isinstance(records, list):
        raise RequestError(f"{path}: split {split!r} is no list of molecules")
    smiles, places, labels, bad = [], [], [], []
    for number, record in enumerate(records):
        place = f"{path.name} {split}[{number}]"
        text = record.get("smiles") if isinstance(record, dict) else record
        if not isinstance(text, str) or not text.strip():
            bad.append(BadRecord(place=place, reason="there is no SMILES"))
            continue
        smiles.append(text.strip())
        places.append(place)
        given = record if isinstance(record, dict) else {}
        labels.append(next((given[name] for name in _LABEL_NAMES if given.get(name) is not None), None))
    return Molecules(
        smiles=tuple(smiles),
        places=tuple(places),
        labels=tuple(labels) if labels and None not in labels else None,
        bad=tuple(bad),
    )


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; metadata are JSON values by name."""
    import numpy as np
    from safetensors.numpy import save

    data = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()},
    )
    write_atomic(path, data)


def read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Every tensor of the file; dtypes that numpy lacks (bfloat16) are converted to float32."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RequestError("features need safetensors: pip install 'brim[molecules]'") from error
    if not path.is_file():
        raise RequestError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a safetensors file: {error}") from error
    except TypeError:  # a dtype that numpy does not have
        return _through_torch(path)


def _through_torch(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }


def read_metadata(path: Path) -> dict[str, str]:
    """The file's metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})


def file_digest(path: Path) -> str:
    """Of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
