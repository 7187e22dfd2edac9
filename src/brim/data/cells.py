"""The cells of a table as parts of a sample: texts, choices, classes, and the files of images and videos.

Of the files only the existence is checked.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.data.base import BadRowError, ImageFile, is_empty
from brim.errors import RequestError, plural
from brim.settings.caller import written

__all__ = [
    "FILES_CHECKED",
    "Choices",
    "Classes",
    "base_folder",
    "cell_text",
    "find_classes",
    "names_in",
    "none_found",
    "read_choices",
    "read_images",
    "read_texts",
    "read_video",
    "right_choice",
    "unpacked",
]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The texts to choose from, and their labels in the data set (`A`, `1`), if it has any."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Classes:
    """How labels become class numbers: by their index among the names, or as they are if they are whole numbers."""

    names: tuple[str, ...]
    column: str
    numbers_are_names: bool = False  # in a column that also holds other labels

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
    """The classes of a column: the names that the data set gives, or whole numbers, or the sorted labels."""
    filled = [value for value in values if not is_empty(value)]
    labels = [value for value in filled if isinstance(value, str) or _whole_number(value) is not None]
    if known or all(_whole_number(label) is not None for label in labels):
        return Classes(names=known, column=column)
    names = {cell_text(label, column).strip() for label in labels}
    return Classes(names=tuple(sorted(names)), column=column, numbers_are_names=True)


def cell_text(value: Any, column: str) -> str:
    """The text of a cell; a number as `str`."""
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
    """The choices of a row: from one column with a list, or from one column per choice."""
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
        raise BadRowError(
            f"{column!r} has {plural(len(texts), 'choice')} and {plural(len(labels), 'label')}; they must be as many"
        )
    return _checked(Choices(texts=texts, labels=tuple(map(str, labels))), column)


def right_choice(value: Any, choices: Choices, column: str) -> tuple[int, ...]:
    """The index of the right choice, given by its label, its text, its position from 0, or its letter."""
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
    """A list or object that is JSON text in a cell, as in CSV files; any other value unchanged."""
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


FILES_CHECKED = 20  # a missing image fails its sample; if all of the first ones are missing, the folder is wrong


def base_folder(names: Iterable[str], folder: Path, images: Path | None) -> Path:
    """The folder that relative names start from: the one given, else the data's, or `images` or `videos` in it."""
    candidates = [images] if images is not None else [folder, folder / "images", folder / "videos"]
    first = list(itertools.islice((name for name in names if "://" not in name), FILES_CHECKED))
    hits = [sum((base / name).is_file() for name in first) for base in candidates]
    if first and not any(hits):
        raise none_found(f"such as {first[0]}", len(first), candidates)
    return candidates[hits.index(max(hits))]


def names_in(value: Any) -> list[str]:
    """The file names in a cell; images stored in the table have none."""
    value = unpacked(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and isinstance(value.get("path"), str) and value.get("bytes") is None:
        return [value["path"]]
    if isinstance(value, list | tuple):
        return [name for part in value for name in names_in(part)]
    return []


def read_images(value: Any, column: str, base: Path) -> tuple[ImageFile, ...]:
    """The images of a cell: names, bytes, `{"bytes": …, "path": …}`, or a list of these; an empty cell has none."""
    value = unpacked(value)
    if is_empty(value):
        return ()
    if isinstance(value, list | tuple):
        return tuple(image for part in value for image in read_images(part, column, base))
    if isinstance(value, ImageFile):
        return (value,)
    if isinstance(value, bytes):
        return (ImageFile(data=value),)
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return (ImageFile(data=value["bytes"]),)
    return tuple(ImageFile(path=_resolved(name, column, base)) for name in _one_name(value, column))


def read_video(value: Any, column: str, base: Path) -> Path | None:
    """The video of a cell: a name, or a `{"path": …}`; an empty cell has none."""
    if is_empty(value):
        return None
    if isinstance(value, ImageFile | bytes):
        raise BadRowError(f"{column!r} holds an embedded video; brim reads videos only from separate files")
    return _resolved(_one_name(value, column)[0], column, base)


def none_found(example: str, count: int, folders: Sequence[Path]) -> RequestError:
    """None of the first images and videos exists in these folders."""
    return RequestError(
        f"of the first {count} images or videos none exists, {example}; brim searched "
        f"{', '.join(map(str, folders))}; give the folder that their names start from with "
        f"{written('images', 'FOLDER')}"
    )


def _one_name(value: Any, column: str) -> list[str]:
    names = names_in(value)
    if len(names) != 1:
        keys = f" with the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
        raise BadRowError(f"{column!r} holds a {type(value).__name__}{keys}, not the name of a file")
    return names


def _resolved(name: str, column: str, base: Path) -> Path:
    if "://" in name:
        raise BadRowError(f"{column!r} holds the address {name}; brim downloads nothing, save the file first")
    return base / Path(name).expanduser()  # an absolute name is kept
