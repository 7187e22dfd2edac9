"""`brim train`: the user's effective batch, in micro-batches that fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.cli.run_report import leave_report

if TYPE_CHECKING:
    from brim.settings.train_request import TrainCommand
    from brim.training.run import TrainResult

__all__ = ["train"]


def train(settings: TrainCommand) -> None:
    """Train with a progress bar, write the report, print the figures; some seeds failed: exit code 1."""
    if settings.compare_batch:
        _compare(settings)
        return
    result = _run(settings)
    _show(result, json_output=settings.json_output)
    if result.failed:
        raise typer.Exit(SOME_FAILED)


def _run(settings: TrainCommand) -> TrainResult:
    from brim.cli.train_progress import TrainProgress
    from brim.ranks.world import current_world
    from brim.training.api import train_as

    lines = not settings.json_output
    with TrainProgress(error_console(), quiet=current_world().rank > 0, lines=lines) as progress:
        return train_as(settings, listener=progress)


def _compare(settings: TrainCommand) -> None:
    from brim.cli.train_progress import TrainProgress, print_comparison
    from brim.training.compare import compare_effective_batches

    with TrainProgress(error_console(), lines=not settings.json_output) as progress:
        rows = compare_effective_batches(settings.request, settings.compare_batch, listener=progress)
    if settings.json_output:
        print_document({"schema": "brim.compare/1", "kind": "train", "rows": rows})
        return
    print_comparison(output_console(), rows)


def _show(result: TrainResult, *, json_output: bool) -> None:
    from brim.cli.train_progress import print_result
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
        return
    print_result(output_console(), result)
