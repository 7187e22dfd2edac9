"""What every comparison prints: its tables, rows that did not run, the recommendation, and where the rest is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from brim.cli.console import output_console, print_document
from brim.cli.report import leave_report
from brim.settings.sizes import format_bytes
from brim.units import duration_text

if TYPE_CHECKING:
    from brim.comparing.record import Comparison

__all__ = ["COMPARE_SCHEMA", "bounds_text", "gain_text", "show_comparison", "trial_tables"]

COMPARE_SCHEMA = "brim.compare/1"


def show_comparison(
    found: Comparison, tables: Callable[[Sequence[Mapping[str, Any]]], Sequence[Table]], *, schema: str, json: bool,
    **more: Any,
) -> None:  # fmt: skip
    """Write the report, and print the tables or the document."""
    report = leave_report(found.folder)
    if json:
        print_document(found.document(schema, **more))
        return
    console = output_console()
    for place, table in enumerate(tables(found.rows)):
        if place:
            console.print()
        console.print(table)
    for row in found.rows:
        named = row.get("batch_size", row.get("name"))
        if row.get("failed"):
            console.print(f"{named}: {row['failed']}", markup=False, highlight=False)
        elif row.get("unclear_because"):
            console.print(f"{named}: not clear: {row['unclear_because']}", markup=False, highlight=False)
    console.print(f"recommended: {found.recommendation['text']}", markup=False, highlight=False)
    where = f"report: {report}" if report is not None else f"in {found.folder}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def gain_text(gain: float | None) -> str:
    """A speed-up; a dash where it was not measured."""
    return "—" if gain is None else f"{gain:.2f}×"


def bounds_text(row: Mapping[str, Any], field: str = "speed_up") -> str:
    """The interval of a row's gain, or that it is not clear; nothing for the row that others are compared with."""
    if row["clear"] is None:
        return ""
    return f"{row[f'{field}_low']:.2f} to {row[f'{field}_high']:.2f}" if row["clear"] else "not clear"


def trial_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Trainings at several effective batches: speed, time and what was learnt; and their memory."""
    learnt = "auroc" if any("auroc" in row for row in rows) else "final_loss"
    speed, memory = Table(box=None, pad_edge=False), Table(box=None, pad_edge=False)
    last = "AUROC" if learnt == "auroc" else "loss"
    for name in ("batch", "micro", "samples/s", "speed-up", "95 %", "epoch", "in total", last):
        speed.add_column(name, justify="right", no_wrap=True)
    for name in ("batch", "forecast", "measured", "limit", "free", "GPU use", "OOM risk"):
        memory.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        size = str(row["batch_size"])
        if row.get("failed") or row["samples_per_second"] is None:
            speed.add_row(size, *["—"] * 7)
            memory.add_row(size, *["—"] * 5, row["risk"])
            continue
        speed.add_row(
            size,
            f"{row['micro_batch_size']}×{row['accumulation_steps']}",
            f"{row['samples_per_second']:,.1f}",
            gain_text(row["speed_up"]),
            bounds_text(row),
            duration_text(row["epoch_seconds"]),
            duration_text(row["total_seconds"]),
            "—" if row[learnt] is None else f"{row[learnt]:.4f}",
        )
        memory.add_row(
            size,
            *(format_bytes(row.get(name)) for name in ("forecast_peak_bytes", "peak_reserved_bytes", "limit_bytes")),
            *(_percent(row.get(name)) for name in ("headroom_fraction", "gpu_utilisation_mean")),
            row["risk"],
        )
    return [speed, memory]


def _percent(fraction: float | None) -> str:
    return "—" if fraction is None else f"{fraction:.0%}"
