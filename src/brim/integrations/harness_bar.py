"""Progress as harnesses' own models draw it, with the bar that they bring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

from tqdm import tqdm

from brim.evaluation.worker import EvalListener
from brim.integrations.harness_work import HarnessWork

__all__ = ["RequestBar", "shown_in_bar"]


class RequestBar(EvalListener):
    """A bar over requests, with notes above it."""

    def __init__(self, name: str) -> None:
        self._bar = tqdm(desc=f"Running {name} requests", total=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def started(self, total: int, done: int) -> None:
        """So much is to be done."""
        self._bar.total, self._bar.n = total, done

    def batch(self, figures: Any, *, cap: int, reserved_bytes: int | None) -> None:
        """So far it is."""
        del cap, reserved_bytes
        self._bar.n = figures.items
        self._bar.refresh()

    def note(self, line: str) -> None:
        """One line above the bar."""
        self._bar.write(f"note: {line}")


@contextlib.contextmanager
def shown_in_bar(work: HarnessWork, name: str) -> Iterator[None]:
    """While inside, a bar follows the work."""
    with RequestBar(name) as bar:
        work.listener = bar
        try:
            yield
        finally:
            work.listener = EvalListener()
