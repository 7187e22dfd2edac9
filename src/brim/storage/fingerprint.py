"""Fingerprints: one short, stable name for what a result depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the facts; their order does not matter, every value does."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
