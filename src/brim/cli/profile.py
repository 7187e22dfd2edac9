"""`brim profile`: accuracy, speed and memory over the values of a knob; a bar for each point, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from brim.cli.check import print_check_summary
from brim.cli.comparison import bounds_text, gain_text, show_comparison
from brim.cli.console import error_console, output_console, print_document
from brim.cli.evaluate import EvalProgress
from brim.cli.report import leave_report
from brim.evaluation.setup import SetupFacts
from brim.profiling.explain_speed import explain_point
from brim.profiling.run import ProfileListener, ProfileResult, profile_as
from brim.ranks.world import current_world
from brim.settings.profile_settings import ProfileSettings
from brim.settings.sizes import format_bytes

__all__ = ["ProfileProgress", "print_profile", "profile", "run_profile", "speed_table"]


def profile(settings: ProfileSettings) -> bool:
    """Profile, or show what makes an evaluation fast; returns whether some points failed."""
    if settings.explain_speed:
        return _explain(settings)
    return run_profile(settings)


def run_profile(settings: ProfileSettings) -> bool:
    """Profile with a progress display, write the report, print the table; returns whether some points failed."""
    rank = current_world().rank
    with ProfileProgress(error_console(), quiet=rank > 0, lines=not settings.json_output) as progress:
        result = profile_as(settings, listener=progress)
    if rank > 0:
        return False
    report = leave_report(result.folder)
    if settings.json_output:
        print_document(result.document)
    else:
        print_profile(output_console(), result, report)
        print_check_summary(output_console(), result.folder)
    return any(entry["state"] == "failed" or entry["num_failed"] for entry in result.entries)


def _explain(settings: ProfileSettings) -> bool:
    with ProfileProgress(error_console(), lines=not settings.json_output) as progress:
        found = explain_point(settings.request, output=settings.output, listener=progress)
    show_comparison(
        found, lambda rows: [speed_table(rows)], schema="brim.explain-speed/1", json=settings.json_output
    )  # fmt: skip
    return found.failed


class ProfileProgress(EvalProgress, ProfileListener):
    """The bar of an evaluation, point by point; one line for each point that is done."""

    def __init__(self, console: Console, *, quiet: bool = False, lines: bool = True) -> None:
        super().__init__(console, quiet=quiet, lines=lines)
        self._opened = False
        self._label = ""
        self._printed: set[str] = set()

    def opened(self, facts: SetupFacts) -> None:
        """Say what is evaluated, once."""
        if not self._opened:
            super().opened(facts)
        self._opened = True

    def started(self, total: int, done: int) -> None:
        """A bar for this point alone."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        super().started(total, done)

    def planned(self, points: int, done: int) -> None:
        """Say how much there is to do."""
        before = f", of which {done} {'was' if done == 1 else 'were'} done already" if done else ""
        self._print_line(f"{points} point{'s' if points != 1 else ''}{before}")

    def point(self, place: int, points: int, label: str) -> None:
        """Remember which point the next lines are about."""
        self._label = f"[{place + 1}/{points}] {label}"

    def point_done(self, entry: Mapping[str, Any]) -> None:
        """One line with its figures."""
        if entry["state"] == "failed":
            self._print_line(f"{self._label}: failed: {str(entry['error']).splitlines()[0]}")
            return
        if "samples_per_second" not in entry:  # another rank has the figures
            return
        parts = []
        if entry["accuracy"] is not None:
            parts.append(f"{entry['metric']} {entry['accuracy']:.4f}")
        if entry["samples_per_second"]:
            parts.append(f"{entry['samples_per_second']:,.1f} samples/s")
        parts.append(f"batch {entry['batch_size_used']}")
        if entry["oom_events"]:
            parts.append(f"{entry['oom_events']} OOM survived")
        self._print_line(f"{self._label}: {', '.join(parts)}")

    def note(self, line: str) -> None:
        """A line above the bar; one that was printed at an earlier point is not repeated."""
        if line not in self._printed:
            self._printed.add(line)
            super().note(line)


def print_profile(console: Console, result: ProfileResult, report: Path | None) -> None:
    """A row for every point, the recommendation, and where the rest is."""
    document = result.document
    knobs: list[str] = document["knobs"]
    recommended = document["recommendation"]["cheapest_within"]
    front = set(document["recommendation"]["front"])
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for knob in knobs:
        table.add_column(knob, justify="right", no_wrap=True)
    for name in ("accuracy", "samples/s", "batch", "peak", "latency", "OOM"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, entry in enumerate(result.entries):
        mark = "→" if place == recommended else "·" if place in front else ""
        table.add_row(mark, *(str(entry[knob]) for knob in knobs), *_cells(entry))
    console.print(table)
    if result.entries:
        console.print("→ recommended   · on the Pareto front   latency: one sample alone, median", style="dim")
    for line in (*document["recommendation"]["text"], *document["notes"]):
        console.print(line, markup=False, highlight=False)
    for entry in result.entries:
        if entry["state"] == "failed":
            named = ", ".join(f"{knob}={entry[knob]}" for knob in knobs)
            console.print(f"failed: {named}: {str(entry['error']).splitlines()[0]}", markup=False, highlight=False)
    where = f"report: {report}" if report is not None else f"in {result.folder}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def _cells(entry: Mapping[str, Any]) -> Sequence[str]:
    if entry["state"] == "failed":
        return ("failed", "—", "—", "—", "—", "—")
    alone = ((entry["latency_ms"]["batch_1"] or {}).get("total") or {}).get("p50")
    rate, peak, accuracy = entry["samples_per_second"], entry["peak_reserved_bytes"], entry["accuracy"]
    return (
        "—" if accuracy is None else f"{accuracy:.3f} ± {entry['accuracy_ci95']:.3f}",
        "—" if not rate else f"{rate:,.1f}",
        str(entry["batch_size_used"]),
        "—" if not peak else format_bytes(peak),
        "—" if alone is None else f"{alone:,.0f} ms",
        str(entry["oom_events"]),
    )


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What each thing brings: times as fast as without it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("switched off", no_wrap=True)
    table.add_column("instead")
    for name in ("samples/s", "it brings", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rate = row["samples_per_second"]
        brings = gain_text(row["brings"]) if row["brings"] is not None else ""
        shown = "—" if rate is None else f"{rate:,.1f}"
        table.add_row(row["name"], row["setting"], shown, brings, bounds_text(row, "brings"))
    return table
