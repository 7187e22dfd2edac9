"""What a function may return for a batch: one result for each item, in the order of the items.

The only place that checks it, for `brim.map`, for functions and tasks that are evaluated, and for whatever else the
executor runs. Knows nothing of what a result is.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from brim.errors import RequestError

__all__ = ["one_for_each"]


def one_for_each(results: Any, count: int, *, source: str = "the function") -> list[Any]:
    """The results as a list; anything but `count` of them in an order of their own is a `RequestError`.

    Lists, tuples, arrays and tensors (by their first dimension) have an order. A set has none, a dictionary has that of
    its keys, a text is one answer, and a generator may end anywhere.
    """
    if not _has_order(results):
        raise RequestError(
            f"{source} returned {_described(results)} for a batch of {count}; return a list with one result for each "
            "item, in the order of the items"
        )
    listed = list(results)
    if len(listed) != count:
        raise RequestError(
            f"{source} returned {len(listed)} results for a batch of {count}; return one for each item, in the order "
            "of the items"
        )
    return listed


def _has_order(results: Any) -> bool:
    dimensions = getattr(results, "ndim", None)  # of an array or a tensor; without any it is a single number
    if isinstance(results, (Mapping, Set, str, bytes, bytearray, memoryview)) or dimensions == 0:
        return False
    if hasattr(results, "keys") and dimensions != 1:  # a table: iterating over it gives the names of its columns
        return False
    return all(hasattr(results, name) for name in ("__len__", "__getitem__", "__iter__"))


def _described(results: Any) -> str:
    if results is None:
        return "nothing (None)"
    kind = type(results).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
