"""Bars on the terminal while something runs, with lines above them: what every long command draws with."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn

__all__ = ["LiveBars"]


class LiveBars:
    """Base of the listeners that draw. Bars only on a terminal; lines there, and elsewhere if `lines`.

    `quiet` is for ranks that are not the first: neither bars nor lines.
    """

    def __init__(self, console: Console, *columns: ProgressColumn, quiet: bool = False, lines: bool = True) -> None:
        self._prints_lines = not quiet and (lines or console.is_terminal)
        self._progress = Progress(
            *columns, console=console, transient=True, disable=quiet or not console.is_terminal, expand=True
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _print_line(self, line: str) -> None:
        if self._prints_lines:
            self._progress.console.print(line, markup=False, highlight=False)
