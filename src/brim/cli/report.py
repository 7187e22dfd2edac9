"""`brim report`: a run's folder as one page, or several runs side by side; and the page that other commands leave.

A run is not lost because its page could not be drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.console import error_console, output_console, print_document
from brim.errors import RequestError

if TYPE_CHECKING:
    from brim.settings.report_settings import ReportSettings

__all__ = ["leave_report", "report"]


def report(settings: ReportSettings) -> None:
    """Write the page and say where it is."""
    from brim.reporting.write import report_as

    result = report_as(settings)
    if settings.json_output:
        print_document(result.document)
    for warning in result.warnings:
        error_console().print(f"warning: {warning}", markup=False, highlight=False)
    console = error_console() if settings.json_output else output_console()
    console.print(f"report in {result.path}", markup=False, highlight=False)


def leave_report(folder: Path) -> Path | None:
    """Write `report.html` into the folder; where that is not possible, print why and continue without."""
    from brim.reporting.write import write_report

    try:
        return write_report(folder)
    except RequestError as error:
        error_console().print(f"note: no report.html: {error}", markup=False, highlight=False)
        return None
