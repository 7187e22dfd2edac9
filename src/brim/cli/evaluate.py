"""`brim eval`: every sample once, as fast as the card allows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.cli.run_report import leave_report
from brim.errors import BrimError

if TYPE_CHECKING:
    from brim.evaluation.run import EvalResult
    from brim.settings.eval_settings import EvaluateSettings

__all__ = ["evaluate"]


def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate with a progress bar, write the report, print the figures; some samples failed: exit code 1."""
    if settings.compare_batch:
        _compare(settings)
        return
    result = _run(settings)
    _show(result, settings)
    if result.summary.get("num_failed"):
        raise typer.Exit(SOME_FAILED)


def _run(settings: EvaluateSettings) -> EvalResult:
    from brim.cli.evaluate_progress import EvalProgress
    from brim.evaluation.run import evaluate_as
    from brim.ranks.world import current_world
    from brim.settings.eval_settings import failed_fast

    lines = not settings.json_output
    with EvalProgress(error_console(), quiet=current_world().rank > 0, lines=lines) as progress:
        try:
            return evaluate_as(settings, listener=progress)
        except (BrimError, KeyboardInterrupt):
            raise
        except Exception as error:
            if settings.request.fail_fast:
                raise failed_fast(error) from error
            raise


def _compare(settings: EvaluateSettings) -> None:
    from brim.cli.evaluate_progress import comparison_table
    from brim.evaluation.run import compare_batch_sizes

    rows = compare_batch_sizes(settings.request, settings.compare_batch)
    if settings.json_output:
        print_document({"schema": "brim.compare/1", "rows": rows})
        return
    output_console().print(comparison_table(rows))


def _show(result: EvalResult, settings: EvaluateSettings) -> None:
    from brim.cli.evaluate_progress import print_result
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if settings.json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
        return
    print_result(output_console(), result, examples=3 if settings.verbose else 0)
