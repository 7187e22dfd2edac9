"""`brim sweep`: every experiment of a file, previewed, run safely, as many at once as fit; bars and result tables."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from brim.cli.check import print_check_summary
from brim.cli.console import error_console, output_console, print_document
from brim.cli.live_bars import LiveBars
from brim.cli.report import leave_report
from brim.errors import RequestError, first_line, plural
from brim.settings.sizes import format_bytes
from brim.settings.sweep_request import SweepCommand
from brim.sweeps.job import AttemptOutcome, Job, SweepListener
from brim.sweeps.prepare import prepared
from brim.sweeps.prepare import sweep as run
from brim.sweeps.results import Result
from brim.sweeps.run import SweepResult
from brim.units import duration_text

__all__ = ["ForecastStatus", "SweepProgress", "print_sweep", "sweep"]


def sweep(settings: SweepCommand) -> bool:
    """Check a file, preview its experiments, or run them; returns whether some failed."""
    if settings.check:
        _check(settings)
        return False
    if settings.dry_run:
        _preview(settings)
        return False
    with SweepProgress(error_console(), lines=not settings.json_output) as progress:
        result = run(settings, listener=progress)
    _show(result, settings)
    return bool(result.failed)


def _check(settings: SweepCommand) -> None:
    from brim.settings.problems import has_errors, in_order, render_problems

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
    from brim.sweeps.preview import render_sweep
    from brim.sweeps.results import preview_document

    with ForecastStatus(error_console()) as status, prepared(settings, status) as preparation:
        plan = preparation.plan()
    if settings.json_output:
        file = settings.request.file
        print_document(preview_document(plan.expansion, plan.forecasts, file=file, seconds=preparation.seconds))
        return
    width = min(shutil.get_terminal_size().columns, 160)
    output_console().print(render_sweep(plan.expansion, plan.forecasts, width=width), markup=False, highlight=False)


def _show(result: SweepResult, settings: SweepCommand) -> None:

    report = leave_report(result.folder)
    if settings.json_output:
        print_document(result.document)
    else:
        print_sweep(output_console(), result, top_n=settings.request.top_n, report=report)
        print_check_summary(output_console(), result.folder)


_NAME = 24  # characters of an experiment's name in a bar


class ForecastStatus(SweepListener):
    """For a sweep that is only checked or previewed: what is being forecast, on a terminal, and notes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("forecasting memory") if console.is_terminal else None

    def __enter__(self) -> ForecastStatus:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def forecasting(self, what: str) -> None:
        """On the line that moves."""
        if self._status is not None:
            self._status.update(f"forecasting memory {what}")

    def note(self, line: str) -> None:
        """A line above it."""
        self._console.print(line, markup=False, highlight=False)


class SweepProgress(LiveBars, SweepListener):
    """One bar for the sweep and one for each running experiment; ends and notes come as lines."""

    def __init__(self, console: Console, *, lines: bool = True) -> None:
        super().__init__(
            console,
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            lines=lines,
        )
        self._whole: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._total = self._done = 0
        self._printed: set[str] = set()

    def forecasting(self, what: str) -> None:
        """A bar of its own, until the experiments are known."""
        if self._whole is None:
            self._whole = self._progress.add_task("forecasting memory", total=None, state=what)
        self._progress.update(self._whole, state=what)

    def planned(self, experiments: int, done: int) -> None:
        """Say how much there is to do."""
        if self._whole is not None:
            self._progress.remove_task(self._whole)
        self._total, self._done = experiments, done
        before = f", of which {done} {'was' if done == 1 else 'were'} done already" if done else ""
        self._print_line(f"{experiments} experiment{'s' if experiments != 1 else ''}{before}")
        self._whole = self._progress.add_task("experiments", total=experiments, completed=done, state=self._count())

    def started(self, job: Job, device: str) -> None:
        """A bar for it."""
        name = job.id if len(job.id) <= _NAME else f"{job.id[: _NAME - 1]}…"
        self._tasks[job.id] = self._progress.add_task(name, total=None, state=device)

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        """Its rate moves the bar; its notes are lines, each once for the whole sweep."""
        if event["event"] == "rate" and job.id in self._tasks:
            state = f"{event['samples_per_second']:,.1f}/s loss {event['loss']:.3f} {event.get('machine', '')}".rstrip()
            self._progress.update(
                self._tasks[job.id], completed=event["samples"], total=event["total"] or None, state=state
            )
        elif event["event"] == "note" and event["line"] not in self._printed:
            self._printed.add(event["line"])
            self.note(f"{job.id}: {event['line']}")

    def ended(self, job: Job, outcome: AttemptOutcome, retried: Job | None) -> None:
        """One line with its figures, or why it failed."""
        task = self._tasks.pop(job.id, None)
        if task is not None:
            self._progress.remove_task(task)
        if retried is None and outcome.state != "interrupted":
            self._done += 1
        if self._whole is not None:
            self._progress.update(self._whole, completed=self._done, state=self._count())
        self._print_line(f"[{self._done}/{self._total}] {job.id}: {_ending(job, outcome, retried)}")

    def note(self, line: str) -> None:
        """A line above the bars."""
        self._print_line(line)

    def _count(self) -> str:
        return f"{self._done}/{self._total}"


def _ending(job: Job, outcome: AttemptOutcome, retried: Job | None) -> str:
    if outcome.state == "interrupted":
        kept = (Path(job.folder) / "checkpoint.json").is_file()
        return "stopped, with a checkpoint" if kept else "stopped before its first checkpoint"
    if outcome.state == "failed":
        then = f"; {retried.changed_because or 'tried again'}" if retried is not None else ""
        return f"failed: {first_line(outcome.error)}{then}"
    figures = outcome.figures
    parts = [f"{name} {value:.4g}" for name, value in list((figures.get("best") or {}).items())[:3]]
    if figures.get("batch_size_used"):
        parts.append(f"batch {figures['batch_size_used']} ({outcome.batch_size_reason.split(':')[0]})")
    parts.append(f"{outcome.seconds:,.1f} s")
    return ", ".join(parts)


def print_sweep(console: Console, result: SweepResult, *, top_n: int, report: Path | None) -> None:
    """The best experiments, the failed ones with their reason, what pairing saved, and where the rest is."""
    document = result.document
    best = result.best
    if best:
        console.print(_best_table(best[:top_n], document["metric"]["name"]))
        if len(best) > top_n:
            console.print(f"… {len(best) - top_n} more in {result.folder / 'results.csv'}", style="dim")
    if result.failed:
        console.print(f"{len(result.failed)} of {len(result.results)} experiments failed:", highlight=False)
        table = Table(box=None, pad_edge=False)
        for name in ("experiment", "failure", "why"):
            table.add_column(name, overflow="fold")
        for one in result.failed[:50]:
            assert one.outcome is not None
            table.add_row(one.experiment.id, one.outcome.failure, first_line(one.outcome.error)[:300])
        console.print(table, markup=False)
    saved = document["time_saved"]
    if saved["experiments_full_product"] > saved["experiments"]:
        seconds = saved["seconds_saved_estimate"]
        ended = sum(one.outcome is not None for one in result.results)
        part = f"; {ended} of them ran" if ended < saved["experiments"] else ""
        about = "" if seconds is None else f", about {duration_text(seconds)} at the mean time of one"
        console.print(
            f"the grid has {saved['experiments']} experiments instead of {saved['experiments_full_product']} with "
            f"every list crossed: {saved['fraction']:.0%} saved{about}{part}",
            highlight=False,
            soft_wrap=False,
        )
    where = f"report: {report}" if report is not None else f"in {result.folder}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def _best_table(best: tuple[Result, ...], metric: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("experiment", overflow="ellipsis", no_wrap=True)
    for name in (metric, "batch", "samples/s", "peak", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in best:
        rate, peak, value = one.figure("samples_per_second"), one.figure("peak_reserved_bytes"), one.metric(metric)
        table.add_row(
            one.experiment.id,
            "—" if value is None else f"{value:.4f}",
            str(one.figure("batch_size_used") or "—"),
            "—" if not rate else f"{rate:,.1f}",
            format_bytes(peak),
            "—" if one.outcome is None else f"{one.outcome.seconds:,.1f}",
        )
    return table
