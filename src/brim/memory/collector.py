"""Python's garbage collector, out of the way for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collector"]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For a block that makes very many objects and no cycles: looking for some would take much of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
