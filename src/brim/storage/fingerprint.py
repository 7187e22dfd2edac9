"""Fingerprints: one short, stable name for what a result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

__all__ = ["combined_fingerprint", "content_text", "differing_parts", "fingerprint"]

DEEPEST = 100  # levels of a value inside of values


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the facts; their order does not matter, every value does."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def combined_fingerprint(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """One fingerprint for each part under its name, `model:… data:…`: two of them show in which part they differ."""
    return " ".join(f"{name}:{fingerprint(facts)}" for name, facts in parts.items())


def differing_parts(one: str, other: str) -> list[str]:
    """The names of the parts in which two combined fingerprints differ; none where they have no parts."""
    known = dict(part.split(":", 1) for part in one.split() if ":" in part)
    return [
        name
        for part in other.split()
        if ":" in part
        for name, value in [part.split(":", 1)]
        if known.get(name) != value
    ]


def content_text(value: Any) -> str:
    """A value as text that is the same in every process, and another one for another content.

    JSON's values, bytes, sets, paths, arrays, tensors, pictures, and objects made of these; a `TypeError` names the
    type of what has no content that could be read, or holds itself.
    """
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, 0))


def _plain(value: Any, depth: int) -> Any:
    """Nested lists of JSON's own values."""
    if depth > DEEPEST:
        raise TypeError(f"{type(value).__name__}, nested too deeply")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, depth + 1) for one in value]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(json.dumps(_plain(one, depth + 1)) for one in value)]
    if isinstance(value, Mapping):
        pairs = ([_plain(key, depth + 1), _plain(one, depth + 1)] for key, one in value.items())
        return ["mapping", sorted(json.dumps(pair) for pair in pairs)]
    kind = type(value).__name__
    if isinstance(value, PurePath) or hasattr(value, "isoformat"):
        return [kind, str(value)]
    if isinstance(value, (bytes, bytearray)) or hasattr(value, "tobytes") or hasattr(value, "detach"):
        return [kind, *_bytes_facts(value, depth)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [kind, [_plain(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)]]
    if getattr(value, "__dict__", None) and not callable(value):
        return [kind, _plain(vars(value), depth + 1)]
    raise TypeError(kind)


def _bytes_facts(value: Any, depth: int) -> list[Any]:
    """Type, shape and digest of bytes, an array, a tensor or a picture."""
    facts: list[Any] = [
        str(getattr(value, name)) for name in ("dtype", "shape", "mode", "size") if hasattr(value, name)
    ]
    if hasattr(value, "detach"):  # a tensor
        facts = [str(value.dtype), str(tuple(value.shape))]
        value = value.detach().cpu()
        value = value.numpy() if value.dtype.is_floating_point is False else value.double().numpy()
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        return [*facts, _plain(value.tolist(), depth + 1)]
    content = value if isinstance(value, (bytes, bytearray)) else value.tobytes()
    return [*facts, hashlib.sha256(content).hexdigest()]
