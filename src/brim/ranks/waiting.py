"""Waiting for other ranks, but not in silence: after half a minute one line says for whom, and for how long at most.

The line is a warning of the logger `brim.ranks`: without a logging configuration it goes to standard error. Knows
nothing of how the ranks talk to each other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["WaitWatcher", "rank_names"]

NOTICE_SECONDS = 30.0  # a wait shorter than this is not worth a line
LOOK_SECONDS = 0.5  # between two looks at whether this rank is waiting

Describe = Callable[[float], str | None]  # the seconds waited to the line; None: another rank says it

_log = logging.getLogger("brim.ranks")


class WaitWatcher:
    """A thread that warns once about every wait that lasts."""

    def __init__(self) -> None:
        self._wait: tuple[float, Describe] | None = None  # since when this rank has been waiting
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, describe: Describe) -> Iterator[None]:
        """While inside, this rank waits for what `describe` says; it is called from another thread, and may block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="brim-waiting", daemon=True)
            self._thread.start()
        self._wait = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._wait = None

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _watch(self) -> None:
        warned: tuple[float, Describe] | None = None
        while not self._closed.wait(LOOK_SECONDS):
            wait = self._wait
            if wait is None or wait is warned or time.monotonic() - wait[0] < NOTICE_SECONDS:
                continue
            warned = wait
            try:
                line = wait[1](time.monotonic() - wait[0])
            except RuntimeError:  # the store is gone: the rank that waits learns it from its own call
                continue
            if line is not None and self._wait is wait:  # it may have ended meanwhile
                _log.warning("brim: %s", line)


def rank_names(ranks: list[int], where: dict[int, str]) -> str:
    """`rank 1 (process 7 on node-a)`, `ranks 1, 2 (process 9 on node-b)`; where a rank runs is left out if unknown."""
    names = ", ".join(f"{rank} ({where[rank]})" if rank in where else str(rank) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
