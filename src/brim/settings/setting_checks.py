"""Checks of single settings: each takes a value as a file or a flag gives it, and returns it as it is used.

A check raises `ValueError` with what it must be; who calls it knows the key. Text that reads as a number is taken as
one, because YAML reads `1e-3` as text and flags are text anyway.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.sizes import parse_bytes

__all__ = [
    "MOST_SEED",
    "Check",
    "SettingKey",
    "any_value",
    "byte_size",
    "choice",
    "flag",
    "fraction",
    "number",
    "optional",
    "size_or_auto",
    "text",
    "whole",
]

MOST_SEED = 2**64 - 1  # the largest that torch.manual_seed takes

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, and in a few words what it takes."""

    takes: str
    read: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        return self.read(value)


@dataclasses.dataclass(frozen=True)
class SettingKey:
    """One key of a training file; one that ends in `*` stands for any name there."""

    key: str
    check: Check
    help: str
    default: Any = None

    @property
    def takes(self) -> str:
        """What the key takes, for tables and messages."""
        return self.check.takes


def whole(least: int, most: int | None = None) -> Check:
    """A whole number from `least`, up to `most` where that is given."""

    def read(value: Any) -> int:
        found = _number(value)
        if found is None or found != int(found) or found < least:
            raise ValueError(f"it must be a whole number from {least}")
        if most is not None and found > most:
            raise ValueError(f"it must be a whole number from {least} to {most}")
        return int(found)

    return Check(f"whole number from {least}", read)


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

    return Check(takes, read)


def fraction() -> Check:
    """A number from 0 up to, but not, 1."""

    def read(value: Any) -> float:
        found = _number(value)
        if found is None or not 0 <= found < 1:
            raise ValueError("it must be a fraction from 0 to below 1")
        return found

    return Check("fraction below 1", read)


def size_or_auto() -> Check:
    """A whole number from 1, or the word auto."""
    counts = whole(1)

    def read(value: Any) -> int | str:
        if isinstance(value, str) and value.lower() == "auto":
            return "auto"
        try:
            size: int = counts(value)
        except ValueError:
            raise ValueError("it must be auto or a whole number from 1") from None
        return size

    return Check("auto or whole number", read)


def text() -> Check:
    """Any text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("it must be a text")
        return value.strip()

    return Check("text", read)


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

    return Check(" or ".join(names) if len(names) < 6 else "one of several words", read)


def flag() -> Check:
    """True or false."""

    def read(value: Any) -> bool:
        found = _WORDS.get(value.lower()) if isinstance(value, str) else value
        if found is True or found is False:
            return found
        raise ValueError("it must be true or false")

    return Check("true or false", read)


def byte_size() -> Check:
    """A size such as 24GiB; kept as it was written."""

    def read(value: Any) -> str:
        try:
            parse_bytes(str(value))
        except RequestError:
            raise ValueError("it must be a size such as 24GiB or 512MiB") from None
        return str(value)

    return Check("size", read)


def any_value() -> Check:
    """Whatever the file has; who uses it checks it."""
    return Check("any", lambda value: value)


def optional(check: Check) -> Check:
    """The same, or nothing."""
    return Check(check.takes, lambda value: None if value is None else check(value))


def _number(value: Any) -> float | None:
    """A finite number, also from text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return None
    if not isinstance(value, (int, float)) or not -sys.float_info.max <= value <= sys.float_info.max:
        return None  # also a whole number that no float can hold
    return value if isinstance(value, int) else float(value)
