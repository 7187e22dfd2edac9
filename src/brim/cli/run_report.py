"""The report that a command leaves in its run folder; a run is not lost because no report could be drawn."""

from __future__ import annotations

from pathlib import Path

from brim.cli.console import error_console
from brim.errors import RequestError

__all__ = ["leave_report"]


def leave_report(folder: Path) -> Path | None:
    """Write `report.html` into the folder; where that is not possible, say why and go on without."""
    from brim.reporting.write import write_report

    try:
        return write_report(folder)
    except RequestError as error:
        error_console().print(f"note: no report.html: {error}", markup=False, highlight=False)
        return None
