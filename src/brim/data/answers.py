"""Cells as answers: accepted texts, choices and which of them is right, classes and their numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brim.data.table import BadRowError, is_empty
from brim.errors import plural

__all__ = ["Choices", "Classes", "cell_text", "find_classes", "read_choices", "read_texts", "right_choice", "unpacked"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The texts to choose from, and what the data set calls each (`A`, `1`), if it says."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Classes:
    """How labels become numbers: by their place among the names; numbers as they are, unless they serve as names."""

    names: tuple[str, ...]
    column: str
    numbers_are_names: bool = False  # in a column that holds other labels too

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def index(self, value: Any) -> int:
        """The class number of a cell."""
        name = cell_text(value, self.column).strip()
        number = None if self.numbers_are_names else _whole_number(value)
        if isinstance(value, str) or number is None:
            number = self._places.get(name, number)
        if number is None or number < 0 or (self.names and number >= len(self.names)):
            of_classes = f"none of the {len(self.names)} classes" if self.names else "no class"
            raise BadRowError(f"the label {name!r} in {self.column!r} is {of_classes}")
        return number


def find_classes(values: Sequence[Any], known: tuple[str, ...], column: str) -> Classes:
    """The classes of a column: as the data set names them, whole numbers as they are, other labels sorted."""
    filled = [value for value in values if not is_empty(value)]
    labels = [value for value in filled if isinstance(value, str) or _whole_number(value) is not None]
    if known or all(_whole_number(label) is not None for label in labels):
        return Classes(names=known, column=column)
    names = {cell_text(label, column).strip() for label in labels}
    return Classes(names=tuple(sorted(names)), column=column, numbers_are_names=True)


def cell_text(value: Any, column: str) -> str:
    """A cell that should be one text; a number is taken as it is written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise BadRowError(f"{column!r} holds {_described(value)}, not a text")


def read_texts(value: Any, column: str) -> tuple[str, ...]:
    """Accepted answers: a text, a list of texts or of `{"answer": …}`, or `{"text": [...]}`."""
    value = unpacked(value) if column.lower().endswith("s") else value
    if isinstance(value, Mapping):
        inner = next(
            (value[key] for key in ("answer", "text", "answers", "value") if not is_empty(value.get(key))), None
        )
        if inner is None:
            raise BadRowError(f"{column!r} holds {_described(value)}, not an answer")
        return read_texts(inner, column)
    if isinstance(value, list | tuple):
        return tuple(text for part in value if part is not None for text in read_texts(part, column))
    return (cell_text(value, column),)


def read_choices(values: Mapping[str, Any], columns: Sequence[str]) -> Choices:
    """The choices of a row: from one column that lists them, or from a column for each."""
    if len(columns) > 1:
        filled = [column for column in columns if not is_empty(values.get(column))]
        texts = tuple(cell_text(values[column], column) for column in filled)
        return _checked(Choices(texts=texts, labels=tuple(filled)), ", ".join(columns))
    column = columns[0]
    value, labels = unpacked(values.get(column)), ()
    if isinstance(value, Mapping):
        labels = value.get("label") or ()
        value = value.get("text")
    if not isinstance(value, list | tuple):
        raise BadRowError(f"{column!r} holds {_described(values.get(column))}, not a list of choices")
    texts = tuple(cell_text(part, column) for part in value)
    if labels and len(labels) != len(texts):
        raise BadRowError(f"{column!r} has {plural(len(texts), 'choice')} and {plural(len(labels), 'label')}")
    return _checked(Choices(texts=texts, labels=tuple(map(str, labels))), column)


def right_choice(value: Any, choices: Choices, column: str) -> tuple[int, ...]:
    """Which choice is right: told by its label, its text, its position from 0, or its letter."""
    if isinstance(value, list | tuple):
        return tuple(place for part in value for place in right_choice(part, choices, column))
    text = cell_text(value, column).strip()
    number = _whole_number(value)
    place = None
    if text in choices.labels or text.upper() in choices.labels:
        place = choices.labels.index(text if text in choices.labels else text.upper())
    elif isinstance(value, str) and text in [choice.strip() for choice in choices.texts]:
        place = [choice.strip() for choice in choices.texts].index(text)
    elif number is not None:
        place = number
    elif len(text) == 1 and text.isascii() and text.isalpha():
        place = ord(text.upper()) - ord("A")
    if place is None or not 0 <= place < len(choices.texts):
        raise BadRowError(
            f"the answer {text!r} in {column!r} is none of the {len(choices.texts)} choices: not a position from 0, a "
            "letter, or the text of one"
        )
    return (place,)


def _checked(choices: Choices, column: str) -> Choices:
    if len(choices.texts) < 2:
        raise BadRowError(f"{column!r} has {plural(len(choices.texts), 'choice')}; there must be 2 or more")
    return choices


def unpacked(value: Any) -> Any:
    """A list that stands as JSON text in a cell, as CSV files have them."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _whole_number(value: Any) -> int | None:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        return int(value)
    return None


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with the keys {', '.join(map(str, value))}"
    if isinstance(value, list | tuple):
        return "a list"
    return "nothing" if value is None else f"a {type(value).__name__}"
