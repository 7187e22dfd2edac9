"""Images inside Arrow tables, for the formats that pyarrow and `datasets` read. It imports neither library.

Hugging Face data sets store images in the table, as `{"bytes": …, "path": …}`. A column of bytes is described without
reading the bytes: each cell becomes an `ImageFile` that is read when it is needed. A data set larger than the memory
can therefore be opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brim.data.base import DataError, ImageFile

__all__ = [
    "CellReader",
    "CellShape",
    "bytes_in",
    "class_names_in",
    "holds_files",
    "image_cells",
    "shapes_of",
]

# A row of a column of bytes: None, one image (its name, which may be ""), or a list of images.
CellShape = str | list[str] | None
# (row, position in its list) to a function that reads the bytes
CellReader = Callable[[int, int | None], Callable[[], bytes]]

_FILE_TYPE = re.compile(r"((large_)?list<\w+: )?(struct<(.*, )?bytes: )?(large_)?binary\b")


def holds_files(type_name: str) -> bool:
    """Whether a column of this Arrow type holds bytes: `binary`, `struct<bytes: binary, …>`, or lists of them."""
    return _FILE_TYPE.match(type_name) is not None


def shapes_of(chunks: Iterable[Any]) -> list[CellShape]:
    """The shape of each row of the column; only the names of images are read, not their bytes."""
    shapes: list[CellShape] = []
    for chunk in chunks:
        if not hasattr(chunk, "value_lengths"):
            shapes += _names(chunk)
            continue
        names = [name or "" for name in _names(chunk.flatten())]
        start = 0
        for length in chunk.value_lengths().to_pylist():
            shapes.append(None if length is None else names[start : start + length])
            start += length or 0
    return shapes


def image_cells(shapes: Sequence[CellShape], reader: CellReader) -> list[Any]:
    """The column's values: an `ImageFile` for each image, or its name where no bytes are stored."""
    first = next((row for row, shape in enumerate(shapes) if shape or shape == ""), None)
    if first is None or not _is_stored(reader(first, 0 if isinstance(shapes[first], list) else None)):
        return list(shapes)
    cells: list[Any] = []
    for row, shape in enumerate(shapes):
        if isinstance(shape, list):
            cells.append([ImageFile(read=reader(row, position)) for position in range(len(shape))])
        else:
            cells.append(None if shape is None else ImageFile(read=reader(row, None)))
    return cells


def bytes_in(cell: Any, position: int | None, *, place: object) -> bytes:
    """The encoded bytes in a cell that has been read."""
    value = cell if position is None or cell is None else cell[position]
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(data, bytes):
        raise DataError(f"{place} holds no bytes")
    return data


def class_names_in(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """The names of the classes by column, from the metadata that the `datasets` library writes."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(feature["names"])
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _names(chunk: Any) -> list[str | None]:
    present = chunk.is_valid().to_pylist()
    with_path = hasattr(chunk, "field") and chunk.type.get_field_index("path") >= 0
    names = chunk.field("path").to_pylist() if with_path else [None] * len(chunk)
    return [(name or "") if there else None for name, there in zip(names, present, strict=True)]


def _is_stored(read: Callable[[], bytes]) -> bool:
    try:
        return bool(read())
    except DataError:
        return False
