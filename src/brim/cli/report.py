"""`brim report`: a run's folder as one page, or several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brim.cli import options
from brim.cli.console import error_console, output_console, print_document
from brim.errors import RequestError

__all__ = ["report"]

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN [RUN2 …]", help="The folder of a run; with several, they are compared.", show_default=False
    ),
]
Page = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", rich_help_panel="Output",
        help="Where the page goes (RUN/report.html; of a comparison ./report-compare.html).", show_default=False,
    ),
]  # fmt: skip


def report(runs: Runs, output: Page = None, json_output: options.JsonOutput = False) -> None:
    """Write a run's report anew, or compare runs of one kind.

    The page is one HTML file: it opens offline, on a phone, in the dark and on paper.

    Example: brim report runs/eval-20260131-093000
    """
    from brim.reporting.write import COMPARISON, REPORT, write_comparison, write_report

    page = _page(output, REPORT if len(runs) == 1 else COMPARISON)
    if len(runs) == 1:
        path = write_report(runs[0], output=page)
        document = {"schema": "brim.report/1", "run": str(runs[0]), "report": str(path)}
    else:
        path = page or Path(COMPARISON)
        document = write_comparison(runs, path)
    if json_output:
        print_document(document)
    for warning in document.get("warnings", ()):
        error_console().print(f"warning: {warning}", markup=False, highlight=False)
    console = error_console() if json_output else output_console()
    console.print(f"report in {path}", markup=False, highlight=False)


def _page(output: Path | None, name: str) -> Path | None:
    """The file to write: in a folder, under the page's usual name."""
    if output is None or not output.is_dir():
        if output is not None and output.suffix.lower() not in (".html", ".htm"):
            raise RequestError(f"--output {output}: give a file that ends in .html, or a folder that exists")
        return output
    return output / name
