"""Dotted keys and nested mappings: `optimizer.params.weight_decay` and back. Pure.

    flatten({"hp": {"epochs": 3}, "optimizer.name": "adam"})  → {"hp.epochs": 3, "optimizer.name": "adam"}
    nest({"hp.epochs": 3, "optimizer.name": "adam"})          → {"hp": {"epochs": 3}, "optimizer": {"name": "adam"}}

A list is a value, an empty mapping as well; `nest` undoes `flatten` and the other way round. Does not know which keys
there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from brim.errors import RequestError

__all__ = [
    "MOST_LEVELS", "MOST_VALUES", "Leaf", "conflicting_keys", "flatten", "leaves", "nest", "plain_value", "value_text",
]  # fmt: skip

MOST_LEVELS = 64  # of a file, or of a mapping that is given in its place
MOST_VALUES = 500_000  # of a file with every alias expanded, or of one list
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

Leaf = tuple[str, Any, tuple[str, ...]]  # dotted key, value, the keys as they were written on the way to it


def leaves(nested: Mapping[str, Any], written: tuple[str, ...] = (), dotted: str = "") -> Iterator[Leaf]:
    """Every value with its dotted key and the path on which it stands."""
    if len(written) > MOST_LEVELS:
        raise RequestError(f"{'.'.join(written[:4])}…: more than {MOST_LEVELS} levels of keys")
    for name, value in nested.items():
        _check_key(name, dotted)
        key, path = f"{dotted}{name}", (*written, name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path, f"{key}.")
        else:
            yield key, value, path


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """One level of dotted keys. A key that is there twice, or is a value and a section, is a `RequestError`."""
    flat: dict[str, Any] = {}
    for key, value, path in leaves(nested):
        if key in flat:
            raise RequestError(f"{key}: it is there twice, the second time as {' → '.join(path)}; keep one")
        flat[key] = value
    for short, long in conflicting_keys(flat):
        raise RequestError(f"{short}: it is a value, and {long} makes it a section; keep one")
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, as deep as the dotted keys go; lists are copied, so that nothing is shared with `flat`."""
    nested: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {"": nested}
    for key, value in flat.items():
        parent, _, name = key.rpartition(".")
        place = sections.get(parent)
        if place is None:
            place = _make_section(sections, key, parent)
        if name in place or not name:
            _check_key(key, "")
            raise RequestError(f"{key}: it is a value and a section at the same time; keep one")
        place[name] = _copy(value)
    return nested


def conflicting_keys(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs (`a`, `a.b`): the first has a value, so the second cannot be under it."""
    known = set(keys)
    found = []
    for key in keys:
        parent = key
        while "." in parent:
            parent = parent.rpartition(".")[0]
            if parent in known:
                found.append((parent, key))
    return found


def plain_value(value: Any, key: str, level: int = 0) -> Any:
    """The value with tuples as lists; whatever JSON cannot hold is a `RequestError` that names the key."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if level > MOST_LEVELS:
        raise RequestError(f"{key}: more than {MOST_LEVELS} levels")
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise RequestError(f"{key}: {value} is not a finite number")
        return value
    if isinstance(value, Mapping):
        below = f"{key}." if key else ""
        return {_check_key(name, below): plain_value(item, f"{below}{name}", level + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        if len(value) > MOST_VALUES:
            raise RequestError(f"{key}: {len(value):,} values are more than {MOST_VALUES:,}")
        return [plain_value(item, key, level + 1) for item in value]
    raise RequestError(f"{key}: {value!r} is a {type(value).__name__}; give a number, a text, a list or a mapping")


def value_text(value: Any) -> str:
    """A value as text that is the same only for the same value: 1, 1.0, true and "1" are four."""
    return _ENCODER.encode(value)


def _make_section(sections: dict[str, dict[str, Any]], key: str, parent: str) -> dict[str, Any]:
    """The mapping of a dotted parent, made with all above it."""
    _check_key(key, "")
    above = ""
    place = sections[""]
    for name in parent.split("."):
        above = f"{above}.{name}" if above else name
        if above not in sections:
            if name in place:
                raise RequestError(f"{key}: {above} is a value and a section at the same time; keep one")
            sections[above] = place[name] = {}
        place = sections[above]
    return place


def _check_key(name: object, dotted: str) -> str:
    if not isinstance(name, str):
        raise RequestError(f"{dotted}{name}: a key must be a text, not {type(name).__name__}")
    if not name or name.startswith(".") or name.endswith(".") or ".." in name:
        raise RequestError(f"{dotted}{name}: a key needs a name on each side of a dot")
    return name


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    return value
