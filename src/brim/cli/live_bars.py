"""Bars on the terminal while something runs, with lines above them: what every long command draws with."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from brim.monitor.sampler import last_sample

__all__ = ["LiveBars", "MachineColumn"]


class MachineColumn(ProgressColumn):
    """Memory and utilisation of the card, or of the host without one, as the run's sampler read them last."""

    max_refresh = 0.5

    def get_table_column(self) -> Column:
        """Never in two lines."""
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        """A few characters; nothing before the first sample."""
        del task
        sample = last_sample()
        return Text("" if sample is None else sample.short_text(), no_wrap=True)


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
