"""`brim lm-eval`: lm-eval's tasks at brim's batch sizes; a bar for each kind of request, then a table of metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import sys

from rich.console import Console
from rich.table import Table

from brim.cli.check import print_check_summary
from brim.cli.console import error_console, output_console, print_document
from brim.cli.evaluate import EvalProgress, summary_rows
from brim.cli.report import leave_report
from brim.evaluation.setup import SetupFacts
from brim.integrations.harness_work import LmEvalResult
from brim.integrations.lm_eval_run import run_lm_eval
from brim.ranks.world import current_world
from brim.settings.lm_eval_settings import LmEvalSettings

__all__ = ["run"]


def run(settings: LmEvalSettings) -> None:
    """Run the tasks with a progress bar, write the report, print the metrics."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about defaults of its own tasks
    quiet = current_world().rank > 0
    with (
        HarnessProgress(error_console(), quiet=quiet, lines=not settings.json_output) as progress,
        contextlib.redirect_stdout(sys.stderr),  # lm-eval's metrics and tasks print as they like
    ):
        result = run_lm_eval(settings, listener=progress)
    if quiet:
        return
    leave_report(result.folder)
    if settings.json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
        return
    print_result(output_console(), result)
    print_check_summary(output_console(), result.folder)


class HarnessProgress(EvalProgress):
    """One bar after the other: requests of a kind come together."""

    def opened(self, facts: SetupFacts) -> None:
        """Say which requests come now."""
        self._print_line(f"{facts.task}: {facts.num_samples:,} to compute on {facts.device}")


def print_result(console: Console, result: LmEvalResult) -> None:
    """Metrics by task, throughput, batch sizes, and where the rest is."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, figure in result.metrics.items():
        half = figure["ci95"]
        table.add_row(name, f"{figure['value']:.4f}" + ("" if half is None else f" ± {half:.4f}"))
    for label, value in summary_rows(result.summary):
        table.add_row({"samples": "requests", "samples/s": "requests/s"}.get(label, label), value)
    console.print(table)
    console.print(f"in {result.folder}", markup=False, highlight=False)
