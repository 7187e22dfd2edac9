"""Which column of a table is the prompt, the reference, the image …: as mapped by the user, else by common names."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from brim.data.base import Table, TaskName, is_empty
from brim.errors import RequestError, nearest_names
from brim.settings.caller import pair, written
from brim.settings.shared import FIELDS

__all__ = ["Fields", "find_fields"]

_PROMPTS = ("instruction", "question", "prompt", "text", "input")
_ANSWERS = {  # by the prompt's column: preferred columns of its answer
    "instruction": ("output",),
    "question": ("answers", "answer"),
    "prompt": ("response", "completion"),
}
_ANY_ANSWER = ("output", "answers", "answer", "response", "completion", "references", "reference")
_CAPTIONS = ("captions", "caption")  # of an image, which needs no prompt
_CHOICE_ANSWERS = ("answer", "answerkey", "label")
_IMAGES = ("image", "image_path", "images", "file_name")
_VIDEOS = ("video", "video_path")
_CHOICES = ("choices", "options")
_IDS = ("id", "question_id", "idx", "sample_id")
_GROUPS = (
    ("group",),
    ("answer_type", "question_type"),
    ("question_type",),
    ("answer_type",),
    ("category",),
    ("subject",),
)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The column for each field, None or empty where there is none; the task follows from them."""

    prompt: str | None
    input: str | None
    context: str | None
    reference: str | None
    label: str | None
    image: str | None
    video: str | None
    choices: tuple[str, ...]  # one column of lists, or a column for each choice
    id: str | None
    group: tuple[str, ...]
    task: TaskName
    is_caption: bool

    @property
    def target(self) -> str | None:
        """The column with the task's answer."""
        return self.label or self.reference if self.task == "classify" else self.reference or self.label

    def shown(self) -> dict[str, str]:
        """Field to column, to show the user."""
        found: dict[str, str | None] = {
            "prompt": self.prompt,
            "input": self.input,
            "context": self.context,
            "label" if self.task == "classify" else "reference": self.target,
            "image": self.image,
            "video": self.video,
            "choices": ", ".join(self.choices),
            "id": self.id,
            "group": ", ".join(self.group),
        }
        return {field: column for field, column in found.items() if column}


def _check_field(name: str, *, entry: str) -> str:
    """The field of that name, in any case; `entry` is what the user wrote."""
    field = name.strip().lower()
    if field not in FIELDS:
        near = nearest_names(field, FIELDS)
        raise RequestError(
            f"{written('map', entry)}: there is no field {name!r}{near}; the fields are {', '.join(FIELDS)}"
        )
    return field


def find_fields(table: Table, mapping: Mapping[str, str], task: TaskName | None) -> Fields:
    """The column of each field. A mapped column that does not exist, or a missing prompt, is a `RequestError`."""
    columns = _Columns(table, mapping)
    prompt = columns.find("prompt", _PROMPTS)
    asked = (prompt or "").lower()
    image, video = columns.find("image", _IMAGES), columns.find("video", _VIDEOS)
    choices = columns.choices()
    answers = (*_CHOICE_ANSWERS, *_ANY_ANSWER) if choices else (*_ANSWERS.get(asked, ()), *_ANY_ANSWER)
    reference = columns.find("reference", answers)
    label = columns.find("label", () if reference == columns.named("label") else ("label",))
    caption = None if prompt or reference or label or not image else columns.find("reference", _CAPTIONS)
    if task is None:
        if choices:
            task = "choice"
        elif label and ("label" in columns.mapped or not reference):
            task = "classify"
        else:
            task = "vqa" if image and asked == "question" else "generate"
    fields = Fields(
        prompt=prompt,
        input=columns.find("input", ("input",) if asked == "instruction" else ()),
        context=columns.find("context", ("context",)),
        reference=reference or caption,
        label=label,
        image=image,
        video=video,
        choices=choices,
        id=columns.find("id", _IDS),
        group=columns.groups(),
        task=task,
        is_caption=caption is not None,
    )
    _check_complete(table, fields)
    return fields


def _check_complete(table: Table, fields: Fields) -> None:
    shown = f"the columns of {table.name} are {', '.join(table.columns)}"
    seen = fields.image or fields.video
    if fields.prompt is None and not (seen and (fields.task == "classify" or fields.is_caption)):
        near = next(filter(None, (nearest_names(name, table.columns) for name in _PROMPTS)), "")
        raise RequestError(
            f"{table.name}: no column for the prompt (brim looks for {', '.join(_PROMPTS)}); {shown}{near or '.'} "
            f"Name it with {written('map', 'prompt=COLUMN')}"
        )
    if fields.task == "choice" and not fields.choices:
        raise RequestError(
            f"{table.name}: no choices (choices, options, or A, B, …); {shown}; use {written('map', 'choices=COLUMN')}"
        )
    if fields.task == "vqa" and not fields.image:
        raise RequestError(
            f"{table.name}: no image, which the task vqa needs; {shown}; use {written('map', 'image=COLUMN')}"
        )
    if fields.task in ("choice", "classify") and fields.target is None:
        field = "label" if fields.task == "classify" else "reference"
        raise RequestError(
            f"{table.name}: no answers, which the task {fields.task} needs; {shown}; use "
            f"{written('map', f'{field}=COLUMN')}"
        )


class _Columns:
    """Finds columns: those that the user mapped, else by name, if at least one row has a value in them."""

    def __init__(self, table: Table, mapping: Mapping[str, str]) -> None:
        self._table = table
        self._by_name: dict[str, str] = {}
        for column in table.columns:
            self._by_name.setdefault(column.lower(), column)
        self.mapped = {
            _check_field(field, entry=f"{field}={column}"): self._mapped(field, column)
            for field, column in mapping.items()
        }

    def find(self, field: str, names: Iterable[str]) -> str | None:
        if field in self.mapped:
            return self.mapped[field][0]
        return next(filter(None, map(self.named, names)), None)

    def named(self, name: str) -> str | None:
        """The column of this name in any case, if it has values and is not mapped to another field."""
        column = self._by_name.get(name)
        taken = any(column in columns for columns in self.mapped.values())
        return None if column is None or taken or not self._has_values(column) else column

    def choices(self) -> tuple[str, ...]:
        if "choices" in self.mapped:
            return self.mapped["choices"]
        listed = self.find("choices", _CHOICES)
        if listed:
            return (listed,)
        lettered: list[str] = []
        for letter in string.ascii_lowercase:
            column = self.named(letter)
            if column is None:
                break
            lettered.append(column)
        return tuple(lettered) if len(lettered) > 1 else ()

    def groups(self) -> tuple[str, ...]:
        if "group" in self.mapped:
            return self.mapped["group"]
        for names in _GROUPS:
            columns = [column for column in map(self.named, names) if column]
            if len(columns) == len(names):
                return tuple(columns)
        return ()

    def _mapped(self, field: str, column: str) -> tuple[str, ...]:
        """The column that the user gave, or several separated by commas."""
        whole = self._existing(column)
        if whole:
            return (whole,)
        parts = column.split(",") if field.strip().lower() in ("choices", "group") else [column]
        return tuple(self._existing(part) or self._refuse(field, part) for part in parts)

    def _existing(self, column: str) -> str | None:
        column = column.strip()
        return column if column in self._table.columns else self._by_name.get(column.lower())

    def _refuse(self, field: str, column: str) -> str:
        columns: Sequence[str] = self._table.columns
        near = nearest_names(column.strip(), columns)
        raise RequestError(
            f"{pair('map', field, column)}: {self._table.name} has no column {column!r}; its columns are "
            f"{', '.join(columns)}{near}"
        )

    def _has_values(self, column: str) -> bool:
        return any(not is_empty(row.values.get(column)) for row in self._table.rows)
