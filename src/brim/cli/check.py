"""`brim check`: a run's checklist as a table; and the line about it with which every run ends."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from brim.cli.console import output_console, print_document
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.advice.check_lines import CheckLine
    from brim.settings.check_settings import CheckSettings

__all__ = ["check", "print_check_summary"]

WIDTH = 80
VERDICTS = {"pass": "pass", "fail": "FAIL", "unknown": "?", None: "-"}
LEGEND = {"unknown": "? could not be judged", None: "- not judged: no limit was asked for"}
STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow", None: ""}


def check(settings: CheckSettings) -> bool:
    """Print the table, or the document; returns whether a line failed."""
    from brim.advice.checks import check_as

    result = check_as(settings)
    if settings.json_output:
        print_document(result.document)
    else:
        _print_lines(output_console(), result.lines)
    return bool(result.failed)


def _print_lines(console: Console, lines: tuple[CheckLine, ...]) -> None:
    from brim.advice.check_lines import counts_text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(VERDICTS[line.verdict], line.title, line.text, style=STYLES[line.verdict])
    console.print(table, soft_wrap=False, width=min(console.width, WIDTH))
    console.print(counts_text(lines, reasons=False), markup=False, highlight=False)
    found = {line.verdict for line in lines}
    legend = [words for verdict, words in LEGEND.items() if verdict in found]
    if legend:
        console.print("   ".join(legend), style="dim")


def print_check_summary(console: Console, folder: Path) -> None:
    """How many lines of the checklist passed, which failed, and how to see them all; nothing for what has none."""
    from brim.advice.check_lines import counts_text
    from brim.advice.checks import check_run
    from brim.advice.run_reader import open_run

    try:
        lines = check_run(open_run(folder))
    except RequestError:  # a record that another process has just removed
        return
    if not lines:
        return
    shown = textwrap.wrap(f"check: {counts_text(lines)};", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    hint = f"brim check {shlex.quote(str(folder))}"
    if len(shown[-1]) + 1 + len(hint) <= WIDTH:
        shown[-1] = f"{shown[-1]} {hint}"
    else:
        shown.append(f"  {hint}")
    for line in shown:
        console.print(line, markup=False, highlight=False)
