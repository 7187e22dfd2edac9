"""`brim ood`: detectors of out-of-distribution molecules, many seeds at once, beside the baselines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from brim.cli.check import print_check_summary
from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.cli.report import leave_report

if TYPE_CHECKING:
    from brim.settings.molecule_settings import OodCommand

__all__ = ["ood"]


def ood(settings: OodCommand) -> None:
    """Train with a progress bar, write the report, print the table; exit code 1 if something failed or was left out."""
    if settings.compare_batch:
        _compare(settings)
        return
    from brim.cli.ood_progress import OodProgress, print_result
    from brim.molecules.run import ood as train

    with OodProgress(error_console(), lines=not settings.json_output) as progress:
        result = train(settings, listener=progress)
    leave_report(result.folder)
    if settings.json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
    else:
        print_result(output_console(), result)
        print_check_summary(output_console(), result.folder)
    if result.failed or result.summary["molecules_left_out"]:
        raise typer.Exit(SOME_FAILED)


def _compare(settings: OodCommand) -> None:
    from brim.cli.comparison import COMPARE_SCHEMA, show_comparison, trial_tables
    from brim.cli.ood_progress import OodProgress
    from brim.molecules.run import compare_ood

    with OodProgress(error_console(), lines=not settings.json_output) as progress:
        found = compare_ood(settings, listener=progress)
    show_comparison(found, trial_tables, schema=COMPARE_SCHEMA, json=settings.json_output, kind="ood")
    if found.failed:
        raise typer.Exit(SOME_FAILED)
