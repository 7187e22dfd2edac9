"""Fingerprints: one short, stable name for what a result depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["combined_fingerprint", "differing_parts", "fingerprint"]


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
