"""`brim sweep`: every experiment of a file, previewed, run safely, as many at once as fit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import typer

from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import RequestError, plural

if TYPE_CHECKING:
    from brim.settings.sweep_request import SweepCommand
    from brim.sweeps.run import SweepResult

__all__ = ["sweep"]


def sweep(settings: SweepCommand) -> None:
    """Check a file, preview its experiments, or run them; some failed: exit code 1."""
    from brim.cli.sweep_progress import SweepProgress
    from brim.sweeps.prepare import sweep as run

    if settings.check:
        _check(settings)
        return
    if settings.dry_run:
        _preview(settings)
        return
    with SweepProgress(error_console(), lines=not settings.json_output) as progress:
        result = run(settings, listener=progress)
    _show(result, settings)


def _check(settings: SweepCommand) -> None:
    from brim.cli.sweep_progress import ForecastStatus
    from brim.settings.problems import has_errors, in_order, render_problems
    from brim.sweeps.prepare import prepared

    with ForecastStatus(error_console()) as status, prepared(settings, status) as preparation:
        plan, problems = preparation.inspect()
    found = in_order(problems)
    wrong = has_errors(found)
    if settings.json_output:
        print_document({"schema": "brim.check/1", "ok": not wrong, "problems": [one.to_json() for one in found]})
    else:
        if found:
            output_console().print(render_problems(found), markup=False, highlight=False)
        if not wrong and plan is not None:
            output_console().print(f"nothing is wrong: {plural(len(plan.expansion), 'experiment')}")
    if wrong:
        raise typer.Exit(RequestError.exit_code)


def _preview(settings: SweepCommand) -> None:
    from brim.cli.sweep_progress import ForecastStatus
    from brim.sweeps.prepare import prepared
    from brim.sweeps.preview import render_sweep
    from brim.sweeps.summary import preview_document

    with ForecastStatus(error_console()) as status, prepared(settings, status) as preparation:
        plan = preparation.plan()
    if settings.json_output:
        file = settings.request.file
        print_document(preview_document(plan.expansion, plan.forecasts, file=file, seconds=preparation.seconds))
        return
    width = min(shutil.get_terminal_size().columns, 160)
    output_console().print(render_sweep(plan.expansion, plan.forecasts, width=width), markup=False, highlight=False)


def _show(result: SweepResult, settings: SweepCommand) -> None:
    from brim.cli.sweep_progress import print_sweep

    report = leave_report(result.folder)
    if settings.json_output:
        print_document(result.document)
    else:
        print_sweep(output_console(), result, top_n=settings.request.top_n, report=report)
    if result.failed:
        raise typer.Exit(SOME_FAILED)
