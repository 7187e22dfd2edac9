"""Checks of single settings: each takes a value as a file, a flag or Python gives it, and returns it as it is used.

A check raises `ValueError` with what it must be; who calls it knows the key. Text that reads as a number is taken as
one, because YAML reads `1e-3` as text and flags are text anyway.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from brim.errors import nearest_names
from brim.settings.sizes import bytes_in

__all__ = [
    "MOST_SEED", "Check", "WrongEntryError", "any_value", "byte_count", "byte_size", "choice", "entries_of", "flag",
    "fraction", "is_whole", "names", "number", "numbers", "optional", "pairs", "path", "path_text", "size_list",
    "size_or_auto", "size_or_none", "text", "texts", "whole",
]  # fmt: skip

MOST_SEED = 2**64 - 1  # the largest that torch.manual_seed takes

_PATH = "str | os.PathLike[str]"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, in a few words what it takes, and the same for editors: as JSON Schema and as Python's type."""

    takes: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    python: str = ""  # what a parameter takes, without None; empty: the field's own type

    def __call__(self, value: Any) -> Any:
        return self.read(value)


def whole(least: int | None = None, most: int | None = None) -> Check:
    """A whole number from `least`, up to `most`, where those are given."""
    takes = "whole number" if least is None else f"whole number from {least}"

    def read(value: Any) -> int:
        found = _number(value)
        if found is None or found != int(found) or (least is not None and found < least):
            raise ValueError(f"it must be a {takes}")
        if most is not None and found > most:
            raise ValueError(f"it must be a {takes} to {most}")
        return int(found)

    return Check(takes, read, _numeric("integer", minimum=least, maximum=most))


def number(*, least: float | None = None, above: float | None = None, most: float | None = None) -> Check:
    """A number in a range."""
    bounds = [
        *([f"from {least:g}"] if least is not None else []),
        *([f"above {above:g}"] if above is not None else []),
        *([f"up to {most:g}"] if most is not None else []),
    ]
    takes = " ".join(["number", *bounds])

    def read(value: Any) -> float:
        found = _number(value)
        wrong = found is None or (least is not None and found < least) or (above is not None and found <= above)
        if found is None or wrong or (most is not None and found > most):
            raise ValueError(f"it must be a {takes}")
        return found

    return Check(takes, read, _numeric("number", minimum=least, exclusiveMinimum=above, maximum=most))


def fraction() -> Check:
    """A number from 0 up to, but not, 1."""

    def read(value: Any) -> float:
        found = _number(value)
        if found is None or not 0 <= found < 1:
            raise ValueError("it must be a fraction from 0 to below 1")
        return found

    return Check("fraction below 1", read, _numeric("number", minimum=0, exclusiveMaximum=1))


def size_or_auto(most: int | None = None) -> Check:
    """A whole number from 1, or the word auto."""
    counts = whole(1, most)
    up_to = "" if most is None else f" to {most}"

    def read(value: Any) -> int | str:
        if isinstance(value, str) and value.lower() == "auto":
            return "auto"
        try:
            size: int = counts(value)
        except ValueError:
            raise ValueError(f"it must be auto or a whole number from 1{up_to}") from None
        return size

    schema = {"anyOf": [counts.schema, {"enum": ["auto"]}]}
    return Check("auto or whole number", read, schema, 'int | Literal["auto"]')


def size_or_none(most: int) -> Check:
    """As `size_or_auto`, for fields that have None for auto."""
    sizes = size_or_auto(most)
    return dataclasses.replace(sizes, read=lambda value: None if (size := sizes(value)) == "auto" else size)


def size_list() -> Check:
    """Batch sizes by commas, or a list of them."""
    counts = whole(1)

    def read(value: Any) -> tuple[int, ...]:
        try:
            sizes = tuple(counts(size) for size in _listed(value) if str(size).strip())
        except ValueError:
            sizes = ()
        if not sizes:
            raise ValueError("give whole numbers from 1, such as 1,2,4,8,16")
        return sizes

    return Check("sizes", read)


def text() -> Check:
    """Any text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("it must be a text")
        return value.strip()

    return Check("text", read, {"type": "string", "minLength": 1})


def path() -> Check:
    """The name of a file or folder."""

    def read(value: Any) -> Path:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ValueError("it must be the name of a file or folder")
        return Path(value)

    return Check("path", read, python=_PATH)


def path_text() -> Check:
    """The same, kept as text: it may also be a name that is no path."""
    return Check("path", lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value, python=_PATH)


def names() -> Check:
    """Words by commas, or a list of them."""

    def read(value: Any) -> tuple[str, ...]:
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
            raise ValueError("it must be names, separated by commas or as a list")
        return tuple(name.strip() for name in listed if name.strip())

    return Check("names", read, python="str | Sequence[str]")


def texts() -> Check:
    """One text or several; commas are part of them."""

    def read(value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(listed, Sequence) or not all(isinstance(one, (str, os.PathLike)) for one in listed):
            raise ValueError("it must be a text or a list of texts")
        return tuple(os.fspath(one) for one in listed)

    return Check("texts", read, python="str | Sequence[str]")


def entries_of(value: Any) -> Sequence[Any]:
    """One text, or several; anything else is a `ValueError`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence):
        return value
    raise ValueError("it must be a text or a list of texts")


def numbers(kind: Callable[[str], Any]) -> Check:
    """Numbers by commas, or a list of them."""

    def read(value: Any) -> tuple[Any, ...]:
        try:
            return tuple(kind(str(part)) for part in _listed(value) if str(part).strip())
        except ValueError:
            raise ValueError("write numbers, separated by commas") from None

    return Check("numbers", read)


def _listed(value: Any) -> Sequence[Any]:
    """The parts of a text by commas, a list as it is, a single value as a list of one."""
    if isinstance(value, str):
        return value.split(",")
    return value if isinstance(value, Sequence) else [value]


class WrongEntryError(ValueError):
    """What is wrong with one entry of several."""

    def __init__(self, entry: Any, message: str) -> None:
        super().__init__(message)
        self.entry = entry


def pairs(example: str, known: Sequence[str] = ()) -> Check:
    """`NAME=VALUE` texts, or a mapping, as a dictionary; of `known` names alone, in any case, where those are given."""

    def read(value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry, name, one in _entries(value, example):
            if known:
                name = name.lower()
            if known and name not in known:
                raise WrongEntryError(
                    entry, f"there is no {name!r} among {', '.join(known)}{nearest_names(name, known)}"
                )
            if name in found:
                raise WrongEntryError(entry, f"{name} is given twice ({found[name]} and {one}); keep one")
            found[name] = one
        return found

    return Check("names with values", read, python=f"Mapping[str, {'str' if known else 'object'}]")


def _entries(value: Any, example: str) -> Iterator[tuple[Any, str, Any]]:
    """Every entry as it was written, with its name and value."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield {name: one}, str(name), one
        return
    for entry in [value] if isinstance(value, str) or not isinstance(value, Sequence) else value:
        name, equals, one = str(entry).partition("=")
        if not equals or not name.strip() or not one.strip():
            raise WrongEntryError(entry, f"write it as {example}")
        yield entry, name.strip(), one.strip()


def choice(*names: str, null: bool = False) -> Check:
    """One of some words, in any case."""

    def read(value: Any) -> str | None:
        if value is None and null:
            return None
        word = str(value).lower() if isinstance(value, str) else ""
        if value is False and "none" in names:  # YAML reads `off` and `no` so
            word = "none"
        if word not in names:
            near = nearest_names(word, names) if word else ""
            raise ValueError(f"it must be one of {', '.join(names)}{near}")
        return word

    known: list[Any] = [*names, *([None] if null else [])]
    takes = " or ".join(names) if len(names) < 6 else "one of several words"
    quoted = ", ".join(f'"{name}"' for name in names)
    return Check(takes, read, {"enum": known}, f"Literal[{quoted}]")


def flag() -> Check:
    """True or false."""

    def read(value: Any) -> bool:
        found = _WORDS.get(value.lower()) if isinstance(value, str) else value
        if found is True or found is False:
            return found
        raise ValueError("it must be true or false")

    return Check("true or false", read, {"type": "boolean"})


def byte_size() -> Check:
    """A size such as 24GiB; kept as it was written."""

    def read(value: Any) -> str:
        try:
            bytes_in(value)
        except ValueError:
            raise ValueError("it must be a size such as 24GiB or 512MiB") from None
        return str(value)

    return Check("size", read, {"type": ["string", "integer"]})


def byte_count() -> Check:
    """A size such as 24GiB, in bytes."""
    return Check("size", bytes_in, byte_size().schema)


def any_value() -> Check:
    """Whatever the file has; who uses it checks it."""
    return Check("any", lambda value: value)


def optional(check: Check) -> Check:
    """The same, or nothing."""
    kind = check.schema.get("type")
    if isinstance(kind, str):
        schema: Mapping[str, Any] = {**check.schema, "type": [kind, "null"]}
    else:
        schema = {"anyOf": [check.schema, {"type": "null"}]} if check.schema else {}
    return Check(check.takes, lambda value: None if value is None else check(value), schema, check.python)


def _numeric(kind: str, **bounds: float | None) -> dict[str, Any]:
    """A number for JSON Schema; text that reads as one is taken too, since YAML reads `1e-3` as text."""
    plain = {"type": kind, **{name: bound for name, bound in bounds.items() if bound is not None}}
    return plain if kind == "integer" else {"anyOf": [plain, {"type": "string", "pattern": "^[-+0-9._eE]+$"}]}


def is_whole(value: Any, *, least: int) -> bool:
    """Whether it is a whole number from `least`, of Python's or NumPy's; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _number(value: Any) -> float | None:
    """A finite number, also from text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return None
    real = isinstance(value, Real)  # NumPy's numbers as well
    if not real or not -sys.float_info.max <= value <= sys.float_info.max:
        return None  # also a whole number that no float can hold
    return int(value) if isinstance(value, Integral) else float(value)
