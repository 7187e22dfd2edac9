"""Tensors inside the dictionaries, lists and tuples that samples and batches are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["replaced"]


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """The value with everything of a kind replaced; what holds it becomes a plain dictionary, list or tuple.

    Named tuples keep their names.
    """
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {key: replaced(part, kind, by) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [replaced(part, kind, by) for part in value]
        if isinstance(value, list):
            return parts
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value
