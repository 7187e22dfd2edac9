"""`brim profile`: accuracy, speed and memory over the values of a knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.cli.run_report import leave_report

if TYPE_CHECKING:
    from brim.profiling.run import ProfileResult
    from brim.settings.profile_settings import ProfileSettings

__all__ = ["profile", "run_profile"]


def profile(settings: ProfileSettings) -> None:
    """Profile, or say what makes an evaluation fast."""
    if settings.explain_speed:
        _explain(settings)
    else:
        run_profile(settings)


def run_profile(settings: ProfileSettings) -> ProfileResult:
    """Profile with a progress display, write the report, print the table; some points failed: exit code 1."""
    from brim.cli.profile_progress import ProfileProgress, print_profile
    from brim.profiling.run import profile_as
    from brim.ranks.world import current_world

    rank = current_world().rank
    with ProfileProgress(error_console(), quiet=rank > 0, lines=not settings.json_output) as progress:
        result = profile_as(settings, listener=progress)
    if rank > 0:
        return result
    report = leave_report(result.folder)
    if settings.json_output:
        print_document(result.document)
    else:
        print_profile(output_console(), result, report)
    if any(entry["state"] == "failed" or entry["num_failed"] for entry in result.entries):
        raise typer.Exit(SOME_FAILED)
    return result


def _explain(settings: ProfileSettings) -> None:
    from brim.cli.profile_progress import ProfileProgress, speed_table
    from brim.profiling.explain_speed import explain_point

    with ProfileProgress(error_console(), lines=not settings.json_output) as progress:
        rows = explain_point(settings.request, listener=progress)
    if settings.json_output:
        print_document({"schema": "brim.explain-speed/1", "rows": [row.to_json() for row in rows]})
        return
    output_console().print(speed_table(rows))
