"""What every tabular format becomes before its columns are understood: rows of named values."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brim.data.base import BadRecord, ImageFile

__all__ = ["BadRowError", "Row", "Table", "columns_of", "is_empty", "joined", "plain_value"]


class BadRowError(Exception):
    """This row is no sample; its message becomes the reason of a `BadRecord`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record: where it stands (`data.jsonl line 7`), its number there, and its values."""

    place: str
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows as read, those that could not be read, and what is known of them besides."""

    name: str
    format: str
    folder: Path  # relative names of images and videos start here
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    bad: tuple[BadRecord, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)  # identity of what was read
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by column of class numbers
    split: str | None = None


def columns_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Every column that some row has, in order of appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row.values))


def joined(tables: Sequence[Table], *, name: str, format_name: str, split: str | None) -> Table:
    """Several tables as one, their rows numbered through."""
    rows = [row for table in tables for row in table.rows]
    return Table(
        name=name,
        format=format_name,
        folder=tables[0].folder,
        columns=columns_of(rows),
        rows=tuple(replace(row, number=number) for number, row in enumerate(rows, start=1)),
        bad=tuple(record for table in tables for record in table.bad),
        content={"files": [dict(table.content) for table in tables]},
        split=split,
    )


def is_empty(value: Any) -> bool:
    """Whether a cell says nothing: null, nan, blank text, or a list or mapping without anything in it."""
    if value is None:
        return True
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, Mapping):
        return all(is_empty(part) for part in value.values())
    return isinstance(value, list | tuple) and all(is_empty(part) for part in value)


def plain_value(value: Any) -> Any:
    """The value as JSON can hold it: bytes and images become a note, dates and other kinds their text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, ImageFile):
        return "<stored image>"  # the same wherever it is stored
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
