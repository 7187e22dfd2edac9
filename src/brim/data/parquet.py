"""Parquet files, one or a folder of them, and images inside of Arrow tables: the only file that imports pyarrow.

Hugging Face data sets store images in the table, as `{"bytes": …, "path": …}`. Columns of bytes are described without
reading the bytes, so that a data set larger than the memory can be opened: each cell becomes an image that is read when
it is needed, a row group at a time, of which the last few are kept. What works on Arrow's arrays here is also used for
the folders of the `datasets` library.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.data.base import DataError, ImageFile, Row, Table, TableFormat, columns_of, plain_value
from brim.data.files import files_digest, records_digest
from brim.data.selection import without_splits
from brim.errors import RequestError

__all__ = [
    "PARQUET",
    "CellReader",
    "CellShape",
    "ParquetCell",
    "bytes_in",
    "class_names_in",
    "holds_files",
    "image_cells",
    "parquet_files",
    "read_parquet",
    "shapes_of",
]

_GROUPS_KEPT = 4


@dataclass(frozen=True, slots=True)
class ParquetCell:
    """Reads the bytes of one cell, or of one position in the cell's list."""

    file: str
    column: str
    group: int
    row: int  # in the group
    position: int | None
    number: int  # of the row in the file, from 1

    def __str__(self) -> str:
        return f"{Path(self.file).name} row {self.number} {self.column}"

    def __call__(self) -> bytes:
        try:
            cell = _column_of_group(self.file, self.group, self.column)[self.row].as_py()
        except (OSError, ValueError) as error:  # Arrow's errors are subclasses
            raise DataError(f"{self}: {error}") from error
        return bytes_in(cell, self.position, place=self)


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in a folder, sorted."""
    return sorted(path for path in folder.glob("*.parquet") if path.is_file() and not path.name.startswith("."))


def read_parquet(
    files: Sequence[Path], *, name: str, folder: Path, format_name: str = "parquet", split: str | None = None
) -> Table:
    """The rows of the files, in order."""
    _column_of_group.cache_clear()  # the files may have been rewritten
    rows: list[Row] = []
    class_names: dict[str, tuple[str, ...]] = {}
    for path in files:
        try:
            records, named = _read_file(path)
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read {path} as parquet: {error}") from error
        class_names |= named
        for number, record in enumerate(records, start=1):
            place = f"{path.name} row {number}"
            rows.append(Row(place=place, number=len(rows) + 1, values=record))
    return Table(
        name=name,
        format=format_name,
        folder=folder,
        columns=columns_of(rows),
        rows=tuple(rows),
        content={"records": records_digest(plain_value(row.values) for row in rows), "files": files_digest(files)},
        class_names=class_names,
        split=split,
    )


def _read_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, tuple[str, ...]]]:
    parquet = _parquet()
    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        stored = [field.name for field in schema if holds_files(str(field.type))]
        plain = [field.name for field in schema if field.name not in stored]
        columns = {name: file.read(columns=[name]).column(0).to_pylist() for name in plain}
        for name in stored:
            columns[name] = image_cells(_shapes(file, name), functools.partial(_cell, path, name, _group_starts(file)))
        names = [field.name for field in schema]
        count = file.metadata.num_rows
        records = [{name: columns[name][row] for name in names} for row in range(count)]
        return records, class_names_in(schema.metadata)


def _shapes(file: Any, column: str) -> list[CellShape]:
    leaves = [file.schema.column(place).path for place in range(len(file.schema.names))]
    paths = [leaf for leaf in leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path")]
    if paths:
        return shapes_of(file.read(columns=paths[:1]).column(0).chunks)
    batches = file.iter_batches(columns=[column], batch_size=256)  # no paths are stored: the bytes have to be read
    return [shape for batch in batches for shape in shapes_of([batch.column(0)])]


def _group_starts(file: Any) -> list[int]:
    starts = [0]
    for group in range(file.num_row_groups):
        starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
    return starts


def _cell(path: Path, column: str, starts: Sequence[int], row: int, position: int | None) -> ParquetCell:
    group = bisect.bisect_right(starts, row) - 1
    return ParquetCell(str(path), column, group, row - starts[group], position, row + 1)


@functools.lru_cache(maxsize=_GROUPS_KEPT)
def _column_of_group(file: str, group: int, column: str) -> Any:
    with _parquet().ParquetFile(file) as opened:
        return opened.read_row_group(group, columns=[column]).column(0)


def _parquet() -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError(f"parquet files need pyarrow ({error}): pip install pyarrow") from error
    return pyarrow.parquet


# A row of such a column: None, one image (its name, which may be ""), or a list of images.
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


def _read_path(path: Path) -> Table:
    """A file, or the files of a folder."""
    files = parquet_files(path) if path.is_dir() else [path]
    return read_parquet(files, name=path.name, folder=path if path.is_dir() else path.parent)


PARQUET = TableFormat(name="parquet", suffixes=(".parquet",), compressible=False, read=without_splits(_read_path))
