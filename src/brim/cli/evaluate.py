"""`brim eval`: every sample once, as fast as the card allows; a bar while it runs, a short table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from brim.cli.check import print_check_summary
from brim.cli.comparison import COMPARE_SCHEMA, bounds_text, gain_text, show_comparison
from brim.cli.console import error_console, output_console, print_document
from brim.cli.live_bars import LiveBars, MachineColumn
from brim.cli.report import leave_report
from brim.errors import BrimError, plural
from brim.evaluation.run import EvalResult, evaluate_as
from brim.evaluation.setup import SetupFacts
from brim.evaluation.worker import EvalListener
from brim.monitor.sampler import last_sample
from brim.ranks.world import current_world
from brim.running.results import ExecutionFigures
from brim.settings.eval_settings import EvaluateSettings, failed_fast
from brim.settings.sizes import format_bytes

__all__ = ["EvalProgress", "comparison_table", "evaluate", "print_result", "summary_rows"]


def evaluate(settings: EvaluateSettings) -> bool:
    """Evaluate with a progress bar, write the report, print the figures; returns whether some samples failed."""
    if settings.compare_batch:
        return _compare(settings)
    result = _run(settings)
    _show(result, settings)
    return bool(result.summary.get("num_failed"))


def _run(settings: EvaluateSettings) -> EvalResult:
    from brim.cli.evaluate import EvalProgress
    from brim.ranks.world import current_world

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


def _compare(settings: EvaluateSettings) -> bool:
    from brim.evaluation.compare import compare_batch_sizes

    with EvalProgress(error_console(), lines=not settings.json_output) as progress:
        found = compare_batch_sizes(
            settings.request, settings.compare_batch, output=settings.output, listener=progress
        )  # fmt: skip
    show_comparison(found, lambda rows: [comparison_table(rows)], schema=COMPARE_SCHEMA, json=settings.json_output)
    return found.failed


def _show(result: EvalResult, settings: EvaluateSettings) -> None:
    if current_world().rank > 0:
        return
    leave_report(result.folder)
    if settings.json_output:
        print_document(json.loads((result.folder / "run.json").read_text(encoding="utf-8")))
        return
    print_result(output_console(), result, examples=3 if settings.verbose else 0)
    print_check_summary(output_console(), result.folder)


class EvalProgress(LiveBars, EvalListener):
    """The bar: samples done, samples/s, time left, batch size, OOM count, utilisation, memory. Notes come as lines."""

    def __init__(self, console: Console, *, quiet: bool = False, lines: bool = True) -> None:
        super().__init__(
            console,
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}"),
            MachineColumn(),
            quiet=quiet,
            lines=lines,
        )
        self._task: TaskID | None = None
        self._done_before = 0

    def opened(self, facts: SetupFacts) -> None:
        """Say what is evaluated."""
        self._print_line(f"{facts.task}: {plural(facts.num_samples, 'sample')} of {facts.data} on {facts.device}")
        fields = ", ".join(f"{name} from {column}" for name, column in facts.fields.items() if name != column)
        if fields:
            self._print_line(f"  {fields}")
        if facts.bad:
            first = facts.bad[0]
            self._print_line(
                f"note: {plural(len(facts.bad), 'record')} left out; the first is {first.place}: {first.reason}"
            )

    def started(self, total: int, done: int) -> None:
        """Set the bar up."""
        self._task = self._progress.add_task("", total=total, completed=done, rate="", state="")
        self._done_before = done
        if done:
            self._print_line(
                f"resumed: {done:,} of {plural(total, 'sample')} {'was' if done == 1 else 'were'} done already"
            )

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        """Move the bar on."""
        del cap
        if self._task is None:
            return
        rate = figures.items / figures.seconds if figures.seconds else 0.0
        state = [f"batch {figures.batch_counts[-1]}" if figures.batch_counts else ""]
        if reserved_bytes and last_sample() is None:  # else the column beside it has the memory of now
            state.append(format_bytes(reserved_bytes))
        state += [f"{figures.oom_events} OOM"]
        self._progress.update(
            self._task,
            completed=self._done_before + figures.items,
            rate=f"{rate:,.1f}/s",
            state=" ".join(filter(None, state)),
        )

    def note(self, line: str) -> None:
        """One line above the bar."""
        self._print_line(f"note: {line}")


def print_result(console: Console, result: EvalResult, *, examples: int = 0) -> None:
    """Metrics, throughput, batch sizes, and where the rest is."""
    summary = result.summary
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, figure in summary["metrics"].items():
        table.add_row(name, f"{figure['value']:.4f} ± {figure['ci95']:.4f}")
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    console.print(table)
    for entry in result.samples[:examples]:
        console.print(f"{entry['id']}: {entry['prediction']!r} (reference {entry['reference']!r})", markup=False)
    _print_failures(console, result.samples)
    console.print(f"in {result.folder}", markup=False, highlight=False)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of a run, by what they are called on the terminal."""
    rows = [("samples", f"{summary['num_samples']:,}")]
    if summary["num_failed"]:
        rows.append(("failed", f"{summary['num_failed']:,}"))
    if summary["samples_per_second"]:
        rows.append(("samples/s", f"{summary['samples_per_second']:,.1f}"))
    sizes = summary["batch_sizes"]
    if sizes:
        spread = f" ({sizes['smallest']} to {sizes['largest']})" if sizes["smallest"] != sizes["largest"] else ""
        rows.append(("batch size", f"{summary['batch_size_used']}{spread}"))
    rows.append(("out of memory", plural(summary["oom_events"], "time")))
    rows.append(("padding", f"{summary['padding_fraction']:.1%}"))
    if summary["gpu_wait_fraction"] is not None:
        rows.append(("idle between batches", f"{summary['gpu_wait_fraction']:.1%}"))
    if summary["peak_reserved_bytes"]:
        rows.append(("peak memory", format_bytes(summary["peak_reserved_bytes"])))
    lengths = summary["answer_tokens"]
    if lengths:
        cut = f", {lengths['truncated_fraction']:.1%} cut off" if lengths["truncated_fraction"] else ""
        rows.append(("answer tokens", f"P95 {lengths['p95']}, max {lengths['max']}{cut}"))
    return rows


def _print_failures(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    failed = [entry for entry in samples if entry["error"] is not None]
    for entry in failed[:3]:
        message = entry["error"]["message"].splitlines()[0][:200]
        console.print(f"failed: {entry['id']}: {message}", markup=False, highlight=False)
    if len(failed) > 3:
        console.print(f"… and {len(failed) - 3:,} more: see `error` in samples.jsonl", markup=False, highlight=False)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The sizes of --compare-batch side by side."""
    table = Table(box=None, pad_edge=False)
    for name in ("batch", "seconds", "samples/s", "speed-up", "95 %", "GPU use", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.get("failed"):
            table.add_row(str(row["batch_size"]), *["—"] * 6)
            continue
        used = row["gpu_utilisation_mean"]
        peak = row["peak_reserved_bytes"]
        table.add_row(
            str(row["batch_size"]),
            f"{row['seconds']:.2f}",
            f"{row['samples_per_second']:,.1f}",
            gain_text(row["speed_up"]),
            bounds_text(row),
            "—" if used is None else f"{used:.0%}",
            "—" if peak is None else format_bytes(peak),
        )
    return table
