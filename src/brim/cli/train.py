"""`brim train`: the user's effective batch, in micro-batches that fit; a bar, a line per epoch, a table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from brim.cli.check import print_check_summary
from brim.cli.comparison import COMPARE_SCHEMA, show_comparison, trial_tables
from brim.cli.console import error_console, output_console, print_document
from brim.cli.live_bars import LiveBars, MachineColumn
from brim.cli.report import leave_report
from brim.errors import plural
from brim.ranks.world import current_world
from brim.settings.sizes import format_bytes
from brim.settings.train_request import TrainCommand
from brim.training.listener import StepRecord, TrainFacts, TrainListener
from brim.training.run import TrainResult
from brim.training.seeds.run import train_as

__all__ = ["TrainProgress", "print_result", "train"]


def train(settings: TrainCommand) -> bool:
    """Train with a progress bar, write the report, print the figures; returns whether some seeds failed."""
    if settings.compare_batch:
        return _compare(settings)
    result = _run(settings)
    _show(result, json_output=settings.json_output)
    return bool(result.failed)


def _run(settings: TrainCommand) -> TrainResult:
    lines = not settings.json_output
    with TrainProgress(error_console(), quiet=current_world().rank > 0, lines=lines) as progress:
        return train_as(settings, listener=progress)


def _compare(settings: TrainCommand) -> bool:
    from brim.training.compare import compare_effective_batches

    with TrainProgress(error_console(), lines=not settings.json_output) as progress:
        found = compare_effective_batches(
            settings.request, settings.compare_batch, output=settings.output, listener=progress
        )  # fmt: skip
    show_comparison(found, trial_tables, schema=COMPARE_SCHEMA, json=settings.json_output, kind="train")
    return found.failed


def _show(result: TrainResult, *, json_output: bool) -> None:
    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
        return
    print_result(output_console(), result)
    print_check_summary(output_console(), result.folder)


class TrainProgress(LiveBars, TrainListener):
    """The bar: samples seen, loss, samples/s, time left, micro-batch, OOM count, use of the card.

    Notes and epochs come as lines.
    """

    def __init__(self, console: Console, *, quiet: bool = False, lines: bool = True) -> None:
        super().__init__(
            console,
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}"),
            MachineColumn(),
            quiet=quiet,
            lines=lines,
        )
        self._task: TaskID | None = None
        self._epochs = 0
        self._run = ""  # which of several runs is under way

    def opened(self, facts: TrainFacts) -> None:
        """Say what is trained."""
        self._epochs = facts.epochs
        ranks = f" on {facts.ranks} ranks" if facts.ranks > 1 else ""
        self._print_line(
            f"{facts.task}: {facts.model} ({plural(facts.parameters, 'weight')}) on "
            f"{plural(facts.train_samples, 'sample')} of "
            f"{facts.data}, {facts.validation_samples:,} held out, {facts.device}{ranks}"
        )
        self._print_line(
            f"effective batch {facts.effective_batch}, {plural(facts.steps_per_epoch, 'step')} an epoch, learning rate "
            f"{facts.learning_rate:.3g}"
        )

    def started(self, total_samples: int, done: int) -> None:
        """Set the bar up."""
        self._task = self._progress.add_task("", total=total_samples, completed=done, epoch="", rate="", state="")

    def step(self, record: StepRecord) -> None:
        """Move the bar on."""
        if self._task is None:
            return
        rate = record.effective_batch / max(record.seconds, 1e-9)
        micro = max(record.micro_batches, default=0)
        self._progress.update(
            self._task,
            completed=record.samples,
            epoch=f"{self._run}epoch {record.epoch + 1}/{self._epochs} loss {record.loss:.4f}",
            rate=f"{rate:,.1f}/s",
            state=f"batch {micro}{f' {record.oom_events} OOM' if record.oom_events else ''}",
        )

    def validating(self, epoch: int) -> None:
        """Say so in the bar."""
        if self._task is not None:
            self._progress.update(self._task, state=f"validating epoch {epoch + 1}")

    def epoch(self, row: dict[str, Any]) -> None:
        """A line for the epoch."""
        figures = [f"{name.removeprefix('val_')} {row[name]:.4f}" for name in row if name.startswith("val_")]
        loss = "—" if row["train_loss"] is None else f"{row['train_loss']:.4f}"
        rate = row["samples_per_second"]
        speed = "" if rate is None else f", {rate:,.1f} samples/s"
        validated = f"; held out: {', '.join(figures)}" if figures else ""
        self._print_line(f"epoch {row['epoch'] + 1}: loss {loss}{validated}{speed}")

    def note(self, line: str) -> None:
        """One line above the bar."""
        self._print_line(f"note: {line}")

    def runs(self, *, total: int, done: int) -> None:
        """Say what an earlier start has left."""
        if done:
            self._print_line(f"resumed: {done} of {plural(total, 'run')} {'was' if done == 1 else 'were'} done already")

    def run_begins(self, name: str) -> None:
        """Name the run in the bar."""
        self._run = f"{name} "

    def runs_begin(self, runs: int) -> None:
        """A bar for the epochs of all stacks."""
        self._task = self._progress.add_task(
            "", total=None, epoch=plural(runs, "run"), rate="", state="measuring paths"
        )

    def stack_epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """Move it on."""
        if self._task is not None:
            state = f"{stopped} stopped early" if stopped else ""
            at_once = f"{runs} at once" if runs > 1 else "one run"
            self._progress.update(
                self._task, total=epochs, completed=epoch, epoch=f"epoch {epoch}/{epochs}", rate=at_once, state=state
            )

    def run_done(self, row: dict[str, Any]) -> None:
        """A line for the run."""
        if row["error"] is not None:
            self._print_line(f"{row['name']} failed: {row['error']}")
            return
        figures = ", ".join(f"{name} {value:.4f}" for name, value in row["figures"].items() if name != "train_loss")
        best = "" if row["best_epoch"] is None else f" (best epoch {row['best_epoch'] + 1} of {row['epochs']})"
        self._print_line(f"{row['name']}: {figures or 'trained'}{best}")


def print_result(console: Console, result: TrainResult) -> None:
    """Figures, sizes, and where the rest is."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, figure in result.metrics.items():
        spread = "" if figure["deviation"] is None else f" ± {figure['deviation']:.4f}"
        table.add_row(name, f"{figure['mean']:.4f}{spread}")
    for label, value in _figures(result.summary):
        table.add_row(label, value)
    console.print(table)
    if "runs" in result.summary:
        _print_runs(console, result)
    console.print(f"in {result.folder}", markup=False, highlight=False, soft_wrap=True)


def _print_runs(console: Console, result: TrainResult) -> None:
    """The result of several runs in a line, how they were trained and why, and which failed."""
    summary = result.summary
    for one in summary["learning_rates"]:
        figures = ", ".join(_spread(name, figure) for name, figure in one["metrics"].items() if name != "train_loss")
        console.print(f"learning rate {one['learning_rate']:g}: {figures}", markup=False, highlight=False)
    main = next((name for name in ("top1", "mean_iou", "val_loss", "train_loss") if name in result.metrics), None)
    if main is not None:
        seeds = summary["seeds"]
        several = f" at learning rate {summary['learning_rate']['base']:g}" if summary["learning_rates"] else ""
        over = f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
        console.print(f"{_spread(main, result.metrics[main])} over {over}{several}", markup=False, highlight=False)
    choice = summary["fast_path_choice"]
    times = f" ×{choice['stack']}" if choice["stack"] > 1 else ""
    graph = ", CUDA graph" if choice["cuda_graph"] else ""
    how = "one after the other" if choice["path"] == "off" else f"{choice['path']}{times}{graph}"
    console.print(f"{how}: {choice['reason']}", markup=False, highlight=False)
    for line in result.failed:
        console.print(f"failed: {line}", markup=False, highlight=False)


def _spread(name: str, figure: Mapping[str, Any]) -> str:
    spread = "" if figure["deviation"] is None else f" ± {figure['deviation']:.4f}"
    return f"{name} {figure['mean']:.4f}{spread}"


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    best = summary["best_epoch"]
    rows = [("epochs", f"{summary['epochs']}" + ("" if best is None else f" (best: {best + 1})"))]
    rows.append(("steps of all runs" if "runs" in summary else "steps", f"{summary['steps']:,}"))
    if summary["samples_per_second"]:
        rows.append(("samples/s", f"{summary['samples_per_second']:,.1f}"))
    rows.append(("effective batch", f"{summary['effective_batch_size']}"))
    rows.append(("micro-batch", f"{summary['micro_batch_size']} × {summary['accumulation_steps']}"))
    if summary["eval_batch_size"]:
        rows.append(("validation batch", f"{summary['eval_batch_size']}"))
    noise = summary["noise_scale"] or {}
    if noise.get("useful_batch"):
        rows.append(("samples stop helping at", f"batch {noise['useful_batch']:,}"))
    if summary.get("gpu_wait_fraction") is not None:
        rows.append(("device idle", f"{summary['gpu_wait_fraction']:.1%}"))
    rows.append(("out of memory", plural(summary["oom_events"], "time")))
    if summary["peak_reserved_bytes"]:
        rows.append(("peak memory", format_bytes(summary["peak_reserved_bytes"])))
    return rows
