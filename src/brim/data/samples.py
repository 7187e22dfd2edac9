"""From the rows of a table to samples, once the column of each field is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brim.data.base import BadRecord, BadRowError, Row, Sample, SampleSet, Table, TaskName, is_empty, plain_value
from brim.data.cells import (
    FILES_CHECKED,
    Classes,
    base_folder,
    cell_text,
    find_classes,
    names_in,
    none_found,
    read_choices,
    read_images,
    read_texts,
    read_video,
    right_choice,
)
from brim.data.fields import Fields
from brim.errors import nearest_names

__all__ = ["check_media", "media_paths", "samples_of", "with_unique_ids"]


def samples_of(table: Table, fields: Fields, *, images: Path | None, task: TaskName | None) -> SampleSet:
    """One sample per row; rows that lack a value they need are in `bad`."""
    reader = _RowReader(
        fields=fields,
        image_base=_base(table, fields.image, images),
        video_base=_base(table, fields.video, images),
        classes=_classes(table, fields),
    )
    samples, bad = [], list(table.bad)
    for row in table.rows:
        try:
            samples.append(reader.sample(row))
        except BadRowError as error:
            bad.append(BadRecord(place=row.place, reason=str(error)))
    shown = fields.shown() | ({"split": table.split} if table.split else {})
    several = any(len(sample.references) > 1 for sample in samples)
    vqa = task is None and fields.task == "generate" and fields.image and fields.prompt and several
    return SampleSet(
        name=table.name,
        format=table.format,
        samples=with_unique_ids(samples),
        suggested_task="vqa" if vqa else fields.task,
        class_names=reader.classes.names,
        bad=tuple(bad),
        facts={"split": table.split, "content": dict(table.content)},
        fields=shown,
    )


def with_unique_ids(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples, with `#2`, `#3` … appended to ids that occurred before."""
    taken: set[str] = set()
    every = {sample.id for sample in samples}
    counts: dict[str, int] = {}
    unique = []
    for sample in samples:
        name = sample.id
        while name in taken or (name != sample.id and name in every):
            counts[sample.id] = counts.get(sample.id, 1) + 1
            name = f"{sample.id}#{counts[sample.id]}"
        taken.add(name)
        unique.append(sample if name == sample.id else replace(sample, id=name))
    return tuple(unique)


def media_paths(samples: Iterable[Sample]) -> Iterable[Path]:
    """Every image and video that is a separate file."""
    for sample in samples:
        yield from (image.path for image in sample.images if image.path is not None)
        if sample.video is not None:
            yield sample.video


def check_media(samples: Sequence[Sample], name: str) -> None:
    """Refuse a data set if none of its first images and videos exists."""
    first = list(itertools.islice(dict.fromkeys(media_paths(samples)), FILES_CHECKED))
    if first and not any(path.is_file() for path in first):
        folders = dict.fromkeys(path.parent for path in first)
        raise none_found(f"such as {first[0].name} of {name}", len(first), list(folders)[:3])


@dataclass(frozen=True, kw_only=True)
class _RowReader:
    """Turns rows with the same columns into samples."""

    fields: Fields
    image_base: Path
    video_base: Path
    classes: Classes

    def sample(self, row: Row) -> Sample:
        fields, values = self.fields, row.values
        choices: tuple[str, ...] = ()
        references: tuple[str | int, ...] = ()
        if fields.task == "choice":
            found = read_choices(values, fields.choices)
            choices = found.texts
            references = right_choice(self._target(row), found, fields.target or "")
        elif fields.task == "classify":
            references = (self.classes.index(self._target(row)),)
        elif fields.target is not None:
            references = read_texts(self._target(row), fields.target)
        return Sample(
            id=self._identity(row),
            prompt=self._prompt(row),
            images=self._images(row),
            video=self._video(row),
            choices=choices,
            references=references,
            group=self._group(row, references),
            original={name: plain_value(value) for name, value in values.items()},
        )

    def _prompt(self, row: Row) -> str | None:
        fields = self.fields
        if fields.prompt is None:
            return None
        instruction, given, context = (
            self._part(row, column) for column in (fields.prompt, fields.input, fields.context)
        )
        text = "\n\n".join(part for part in (instruction, given) if part)
        if not text:
            raise _missing(row, fields.prompt)
        return f"{context}\n{text}" if context else text

    def _part(self, row: Row, column: str | None) -> str:
        value = row.values.get(column) if column is not None else None
        return "" if column is None or is_empty(value) else cell_text(value, column)

    def _target(self, row: Row) -> Any:
        column = self.fields.target
        assert column is not None  # find_fields refuses tasks that need it
        value = row.values.get(column)
        if is_empty(value):
            raise _missing(row, column)
        return value

    def _images(self, row: Row) -> Any:
        column = self.fields.image
        if column is None:
            return ()
        images = read_images(_present(row, column), column, self.image_base)
        if not images and self.fields.prompt is None and self.fields.video is None:
            raise _missing(row, column)
        return images

    def _video(self, row: Row) -> Path | None:
        column = self.fields.video
        if column is None:
            return None
        video = read_video(_present(row, column), column, self.video_base)
        if video is None and self.fields.prompt is None and self.fields.image is None:
            raise _missing(row, column)
        return video

    def _identity(self, row: Row) -> str:
        value = row.values.get(self.fields.id) if self.fields.id is not None else None
        return str(row.number if is_empty(value) else value)

    def _group(self, row: Row, references: tuple[str | int, ...]) -> str | None:
        parts = [row.values.get(column) for column in self.fields.group]
        if any(not is_empty(part) for part in parts):
            return "/".join("" if part is None else str(part) for part in parts)
        if self.fields.task != "classify":
            return None
        index = references[0]
        return self.classes.names[index] if self.classes.names and isinstance(index, int) else str(index)


def _classes(table: Table, fields: Fields) -> Classes:
    if fields.task != "classify" or fields.target is None:
        return Classes(names=(), column="")
    values = [row.values.get(fields.target) for row in table.rows]
    return find_classes(values, table.class_names.get(fields.target, ()), fields.target)


def _base(table: Table, column: str | None, images: Path | None) -> Path:
    if column is None:
        return table.folder
    names = (name for row in table.rows for name in names_in(row.values.get(column)))
    return base_folder(names, table.folder, images)


def _present(row: Row, column: str) -> Any:
    if column not in row.values:
        raise _missing(row, column)
    return row.values[column]


def _missing(row: Row, column: str) -> BadRowError:
    if column in row.values:
        return BadRowError(f"{column!r} is empty")
    near = nearest_names(column, row.values)
    has = ", ".join(row.values) or "nothing"
    return BadRowError(f"has no {column!r}, which other records have; it has {has}{near}")
