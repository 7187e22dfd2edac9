"""Comma- or tab-separated files with a header line."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path

from brim.data.base import BadRecord, Row, Table, TableFormat
from brim.data.files import decoded, inner_suffix, read_content, text_digest
from brim.data.selection import without_splits
from brim.errors import RequestError, plural

__all__ = ["CSV", "read_csv"]

_LONGEST_CELL = 2**31 - 1  # the csv module's own limit is 131,072 characters


def read_csv(path: Path) -> Table:
    """The rows of a `.csv` or `.tsv` file, also with `.gz`; an empty cell is no value, ragged rows are in `bad`."""
    content = read_content(path)
    text = decoded(content, path)
    with _long_cells():
        rows, bad = [], []
        records = _records(path, text, delimiter="\t" if inner_suffix(path) == ".tsv" else ",")
        header = _header(path, next(records, None))
        for item in records:
            if isinstance(item, BadRecord):
                bad.append(item)
                continue
            line, cells = item
            place = f"{path.name} line {line}"
            if len(cells) != len(header):
                bad.append(
                    BadRecord(place=place, reason=f"has {plural(len(cells), 'cell')}, the header has {len(header)}")
                )
                continue
            values = {name: cell if cell.strip() else None for name, cell in zip(header, cells, strict=True)}
            rows.append(Row(place=place, number=line, values=values))
    return Table(
        name=path.name,
        format="csv",
        folder=path.parent,
        columns=tuple(header),
        rows=tuple(rows),
        bad=tuple(bad),
        content={"sha256": text_digest([content])},
    )


def _records(path: Path, text: str, *, delimiter: str) -> Iterator[tuple[int, list[str]] | BadRecord]:
    """Each record with the number of its first line; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRecord(place=f"{path.name} line {line}", reason=f"not readable: {error}")
            continue
        if cells:
            yield line, cells


def _header(path: Path, first: tuple[int, list[str]] | BadRecord | None) -> list[str]:
    if first is None:
        raise RequestError(f"{path} is empty; it needs a header line with the names of the columns")
    if isinstance(first, BadRecord):
        raise RequestError(f"{path}: the header line is {first.reason}")
    header = [cell.strip() or f"column {place}" for place, cell in enumerate(first[1], start=1)]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise RequestError(
            f"{path}: the header names {', '.join(twice)} more than once; the first line must name every column once"
        )
    return header


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


CSV = TableFormat(name="csv", title="CSV", suffixes=(".csv", ".tsv"), read=without_splits(read_csv))
