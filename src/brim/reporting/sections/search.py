"""A batch-size search: every size that was tried, what it took, how fast it was, and which did not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.reporting.base import Column, Key, Panel, Section, Table
from brim.reporting.charts.probes import draw_probes
from brim.reporting.charts.theme import ACCENT, BAD, LIMIT, Line, series_colour
from brim.reporting.rows.probes import probe_rows, probes_of
from brim.reporting.units import byte_unit, bytes_text, count_text, number, significant
from brim.reporting.wording import listed, trend_words

__all__ = ["FITS_KEYS", "LIMIT_KEY", "PROBE_COLUMNS", "plan_section", "shown_probes"]

FITS_KEYS = (Key(label="fits", colour=series_colour(0)), Key(label="did not fit", colour=BAD, mark="cross"))
LIMIT_KEY = Key(label="memory limit", colour=LIMIT, mark="dashed")

PROBE_COLUMNS = (
    Column(title="batch size", field="batch_size", show=count_text),
    Column(title="verdict", field="verdict", words=True),
    Column(title="allocated", field="allocated_bytes", show=bytes_text),
    Column(title="reserved", field="reserved_bytes", show=bytes_text),
    Column(title="samples/s", field="rate", show=significant),
    Column(title="cost", field="cost", show=count_text),
    Column(title="phase", field="phase", words=True),
    Column(title="detail", field="detail", words=True),
)


def plan_section(plan: Mapping[str, Any]) -> Section | None:
    """The search behind a plan; None where it made no probe."""
    memory = plan.get("memory")
    limit = number(memory.get("limit_bytes")) if isinstance(memory, dict) else None
    rows = shown_probes(probe_rows(probes_of(plan), place={"line": "probes", "label": ""}, limit_bytes=limit))
    if not rows:
        return None
    chosen = number(plan.get("size"))
    in_samples = plan.get("unit") == "samples"  # a cap on tokens is no size to ring
    rows = [{**row, "chosen": in_samples and row["batch_size"] == chosen} for row in rows]
    lines = [Line(label="probes", colour=series_colour(0))]
    unit = byte_unit([*(row["drawn_bytes"] for row in rows), limit])
    most = max((row["drawn_bytes"] or 0 for row in rows), default=0)
    limits = [limit / unit.size] if limit is not None and limit <= 4 * most else []
    memory_drawn = [{**row, "y": unit.of(row["drawn_bytes"])} for row in rows]
    speed_drawn = [{**row, "y": row["rate"]} for row in rows]
    ringed = (Key(label="chosen", colour=ACCENT, mark="ring"),) if any(row["chosen"] for row in rows) else ()
    keys = (*FITS_KEYS, *ringed) if any(not row["fits"] for row in rows) else (FITS_KEYS[0], *ringed)
    ordered = sorted((row for row in rows if row["fits"]), key=lambda row: row["batch_size"])
    grows = trend_words([(count_text(row["batch_size"]), row["reserved_bytes"]) for row in ordered], bytes_text)
    rates = trend_words([(count_text(row["batch_size"]), row["rate"]) for row in ordered], significant)
    panels: tuple[Panel, ...] = (
        Panel(
            title=f"Reserved memory ({unit.name})",
            spec=draw_probes(memory_drawn, lines=lines, limits=limits),
            alternative=f"Reserved memory over batch size: {grows}. {_missed_words(rows)}",
            keys=(*keys, LIMIT_KEY) if limits else keys,
        ),
        Panel(
            title="Throughput (samples/s)",
            spec=draw_probes(speed_drawn, lines=lines),
            alternative=f"Samples per second over batch size: {rates}.",
            keys=(FITS_KEYS[0], *ringed),
        ),
    )
    if all(row["y"] is None for row in memory_drawn):
        panels = panels[1:]
    return Section(
        title="Batch-size search",
        panels=panels,
        table=Table(caption="Every size tried, in order", columns=PROBE_COLUMNS, rows=rows).known(),
    )


def shown_probes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what hovering shows."""
    return [
        {
            **row,
            "size_shown": count_text(row["batch_size"]),
            "memory_shown": bytes_text(row["reserved_bytes"]),
            "rate_shown": significant(row["rate"]),
        }
        for row in rows
    ]


def _missed_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which sizes did not fit, and why."""
    missed = [f"{count_text(row['batch_size'])} ({row['verdict']})" for row in rows if not row["fits"]]
    return f"Did not fit: {listed(missed)}." if missed else "Every size tried fitted."
