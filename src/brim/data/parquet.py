"""Parquet: one file, or a folder of them. The only file that imports pyarrow.

An image that is stored in the table is read when it is needed, a row group at a time; the last few row groups are kept.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.data.arrow_cells import CellShape, bytes_in, class_names_in, holds_files, image_cells, shapes_of
from brim.data.base import DataError, Row, Table, TableFormat, columns_of, plain_value
from brim.data.files import files_digest, files_in, records_digest
from brim.data.selection import without_splits
from brim.errors import RequestError

__all__ = ["PARQUET", "ParquetCell", "parquet_files", "read_parquet"]

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
    return [path for path in files_in(folder) if path.suffix.lower() == ".parquet"]


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


def _read_path(path: Path) -> Table:
    """A file, or the files of a folder."""
    files = parquet_files(path) if path.is_dir() else [path]
    return read_parquet(files, name=path.name, folder=path if path.is_dir() else path.parent)


PARQUET = TableFormat(
    name="parquet",
    title="Parquet",
    suffixes=(".parquet",),
    compressible=False,
    reads_folders=True,
    read=without_splits(_read_path),
)
