"""What every data set becomes: samples with an id, what the model reads, and the accepted answers.

Reading a data set opens no image and no video; `images.py` and `video.py` do, one sample at a time. A request that
cannot be read is a `RequestError`; a single sample that cannot is a `DataError`, and costs only that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["TASKS", "BadRecord", "DataError", "ImageFile", "Sample", "SampleSet", "Task"]

Task = Literal["generate", "vqa", "choice", "classify"]
TASKS: tuple[Task, ...] = ("generate", "vqa", "choice", "classify")


class DataError(ValueError):
    """This sample's image or video cannot be read; the other samples can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """Where an image is: a file, encoded bytes, or a place in a larger file; nothing is opened."""

    path: Path | None = None
    data: bytes | None = None
    read: Callable[[], bytes] | None = None  # gives the encoded bytes: data sets of images need not fit in memory

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"embedded image of {len(self.data)} bytes" if self.data is not None else str(self.read or "no image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One item of a data set."""

    id: str  # unique in the set
    prompt: str | None = None
    images: tuple[ImageFile, ...] = ()
    video: Path | None = None
    choices: tuple[str, ...] = ()
    references: tuple[str | int, ...] = ()  # accepted answers, or the index of the right class or choice
    group: str | None = None  # what a stratified sample keeps in proportion
    recording: str | None = None  # samples of the same one are alike: they belong on one side of a split
    original: Mapping[str, Any] = field(default_factory=dict)  # the record as found; values that JSON can hold


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """A record that was left out, where it stands, and why."""

    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """A data set that has been read.

    `facts` is its identity for fingerprints: the content, never where it lies or when it was written. `fields` says
    which column served as what.
    """

    name: str
    format: str
    samples: tuple[Sample, ...]
    suggested_task: Task
    class_names: tuple[str, ...] = ()
    bad: tuple[BadRecord, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
