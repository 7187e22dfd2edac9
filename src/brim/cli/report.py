"""`brim report`: a run's folder as one page, or several runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli.console import error_console, output_console, print_document

if TYPE_CHECKING:
    from brim.settings.other_settings import ReportSettings

__all__ = ["report"]


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
