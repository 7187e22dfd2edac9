"""What every data set becomes: samples with an id, what the model reads, and the accepted answers.

Tabular formats are read as a `Table` of rows first; `fields.py` and `samples.py` turn it into samples. Reading a data
set opens no image and no video; `images.py` and `video.py` do, one sample at a time. A request that cannot be read is a
`RequestError`; a single sample that cannot is a `DataError`, and only that sample fails.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "TASKS",
    "BadRecord",
    "BadRowError",
    "DataError",
    "ImageFile",
    "Row",
    "Sample",
    "SampleFormat",
    "SampleSet",
    "Table",
    "TableFormat",
    "TaskName",
    "columns_of",
    "is_empty",
    "joined",
    "plain_value",
]

TaskName = Literal["generate", "vqa", "choice", "classify"]
TASKS: tuple[TaskName, ...] = ("generate", "vqa", "choice", "classify")


class DataError(ValueError):
    """This sample's image or video cannot be read; the other samples can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """Where an image is stored: in a file, as encoded bytes, inside a larger file, or with its caller, as an object.

    Nothing is opened.
    """

    path: Path | None = None
    data: bytes | None = None
    read: Callable[[], bytes] | None = None  # returns the encoded bytes when they are needed
    decoded: Callable[[], Any] | None = None  # returns Pillow's image, which the model is given as it is
    size: tuple[int, int] | None = None  # width and height, of a decoded one

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return (
            f"embedded image of {len(self.data)} bytes"
            if self.data is not None
            else str(self.read or self.decoded or "no image")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One item of a data set."""

    id: str  # unique in the set
    prompt: str | None = None
    images: tuple[ImageFile, ...] = ()
    video: Path | None = None
    choices: tuple[str, ...] = ()
    references: tuple[str | int, ...] = ()  # accepted answers, or the index of the right class or choice
    group: str | None = None  # a limit keeps groups in proportion
    recording: str | None = None  # samples of one recording are alike: a split keeps them together
    original: Mapping[str, Any] = field(default_factory=dict)  # the record as read, with JSON values only


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """A record that was left out: its place (`data.jsonl line 7`) and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """A data set that has been read.

    `facts` is its identity for fingerprints: the content, not its path or date. `fields` names the column
    of each field.
    """

    name: str
    format: str
    samples: tuple[Sample, ...]
    suggested_task: TaskName
    class_names: tuple[str, ...] = ()
    bad: tuple[BadRecord, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


class BadRowError(Exception):
    """This row is not a valid sample; the message becomes the reason of a `BadRecord`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record: its place (`data.jsonl line 7`), its number in the file, and its values."""

    place: str
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that has been read: its rows, and the records that could not be read."""

    name: str
    format: str
    folder: Path  # relative names of images and videos start from it
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    bad: tuple[BadRecord, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)  # identity of what was read
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by column of class numbers
    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """A format of tables: `read(path, split)` reads a file with one of the suffixes, or a folder."""

    name: str  # in records, and in a training file's data.type
    title: str  # in help, errors and documents
    read: Callable[[Path, str | None], Table]
    suffixes: tuple[str, ...] = ()
    document_suffixes: tuple[str, ...] = ()  # in a folder, read only if nothing else there is data
    compressible: bool = True  # also with .gz
    reads_folders: bool = False  # several files of a folder are one table
    owns: Callable[[Path], bool] = lambda path: False  # noqa: ARG005  # True: read as this format and no other


@dataclass(frozen=True, kw_only=True)
class SampleFormat:
    """A format that needs no columns: `read(path, split, images folder)` reads what `found_in(path)` recognises."""

    name: str
    title: str
    found_in: Callable[[Path], bool]
    read: Callable[[Path, str | None, Path | None], SampleSet]
    tasks: tuple[TaskName, ...]  # that its samples can be used for
    owns: Callable[[Path], bool] = lambda path: False  # noqa: ARG005  # as in `TableFormat`


def columns_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Every column that some row has, in order of appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row.values))


def joined(tables: Sequence[Table], *, name: str, format_name: str, split: str | None) -> Table:
    """Several tables as one, with rows numbered from 1 over all of them."""
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
    """Whether a cell has no value: null, nan, blank text, or a list or mapping of only such values."""
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
    """The value as JSON: bytes and images become a placeholder, dates and other types their text."""
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
        return "<stored image>"  # the same text wherever it is stored
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
