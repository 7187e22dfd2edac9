"""A batch-size search: every size that was tried, its memory, its speed, and which did not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.advice.run_reader import entries, value_at
from brim.reporting.base import Column, PageTable, Section, present, words
from brim.reporting.charts import Axis, Chart, crosses, limit_line, line_chart, rings
from brim.reporting.theme import ACCENT, LegendKey, Series, series_colour
from brim.units import byte_unit, bytes_text, count_text, listed, number, significant

__all__ = ["FITS", "MISSED", "PROBE_COLUMNS", "plan_section", "probe_charts", "probe_rows"]

# A probe's verdict, and what it is called for people; all but the first did not fit.
VERDICTS = {
    "fits": "fits",
    "oom": "out of memory",
    "thrashes": "short of memory",
    "size_limit": "size limit of a kernel",
    "timeout": "timed out",
    "fatal": "crashed",
}
FITS, MISSED = Series(label="fits", colour=series_colour(0), named=True), "did not fit"
_TAKEN = LegendKey("chosen", ACCENT, "ring")

PROBE_COLUMNS = (
    Column("batch size", "batch_size", count_text),
    words("verdict"),
    Column("allocated", "allocated_bytes", bytes_text),
    Column("reserved", "reserved_bytes", bytes_text),
    Column("samples/s", "rate", significant),
    Column("cost", "cost", count_text),
    words("phase"),
    words("detail"),
)


def probe_rows(
    probes: Iterable[Mapping[str, Any]], *, place: Mapping[str, Any] | None = None, limit_bytes: float | None = None
) -> list[dict[str, Any]]:
    """One row per probe that has a size, in the order they were made.

    A probe that ran out of memory has no peak to speak of: it is drawn at what it needed, or at the limit.
    """
    rows: list[dict[str, Any]] = []
    for step, probe in enumerate(probes, 1):
        size = number(probe.get("batch_size"))
        if size is None:
            continue
        verdict = str(probe.get("verdict"))
        reserved, needed = number(probe.get("peak_reserved_bytes")), number(probe.get("needed_bytes"))
        fits = verdict == "fits"
        known = [reserved] if fits else [one for one in (needed, reserved, limit_bytes) if one is not None]
        rows.append(
            {
                "line": FITS.label, **(place or {}), "step": step, "batch_size": size, "fits": fits,
                "verdict": VERDICTS.get(verdict, verdict), "reserved_bytes": reserved,
                "allocated_bytes": number(probe.get("peak_allocated_bytes")),
                "drawn_bytes": known[0] if known else None,
                "rate": number(probe.get("samples_per_second")), "cost": number(probe.get("cost")),
                "phase": probe.get("phase"), "detail": probe.get("detail"),
            }
        )  # fmt: skip
    return rows


def plan_section(
    plan: Mapping[str, Any], *, title: str = "Batch-size search", said: tuple[str, ...] = ()
) -> Section | None:
    """The search behind a plan; None where it made no probe."""
    limit = number(value_at(plan, "memory.limit_bytes"))
    rows = probe_rows(entries(plan.get("probes")), limit_bytes=limit)
    if not rows:
        return None
    chosen = number(plan.get("size")) if plan.get("unit") == "samples" else None  # a cap on tokens is no size to ring
    rows = [{**row, "chosen": row["fits"] and row["batch_size"] == chosen} for row in rows]
    most = max(row["drawn_bytes"] or 0 for row in rows)
    near = limit if limit is not None and limit <= 4 * most else None  # a far limit would flatten the curve
    missed = [f"{count_text(row['batch_size'])} ({row['verdict']})" for row in rows if not row["fits"]]
    fitted = f"Did not fit: {listed(missed)}." if missed else "Every size tried fitted."
    charts = probe_charts(rows, limit_bytes=near, titles=("Reserved memory", "Throughput"), note=fitted)
    table = PageTable("Every size tried, in order", PROBE_COLUMNS, rows)
    return Section(title=title, paragraphs=said, charts=charts, table=table)


def probe_charts(
    rows: Sequence[Mapping[str, Any]], *, limit_bytes: float | None, titles: tuple[str, str], note: str = "",
    series: Sequence[Series] = (FITS,),
) -> tuple[Chart, ...]:  # fmt: skip
    """Reserved memory and samples per second over the batch size; a chart of which nothing was measured is left out.

    Sizes that did not fit are crosses. A size that was tried again is on the line once, at its last try.
    """
    unit = byte_unit([*(row["drawn_bytes"] for row in rows), limit_bytes])
    drawn = (
        (f"{titles[0]} ({unit.name})", "drawn_bytes", unit.size, bytes_text),
        (f"{titles[1]} (samples/s)", "rate", 1.0, significant),
    )
    charts = []
    for title, field, scale, show in drawn:
        sized = [
            {**row, "x": row["batch_size"], "y": row[field] / scale, "shown": show(row[field]),
             "label": _place(row), "reason": f"{row['verdict']} at {_place(row)}"}
            for row in sorted(rows, key=lambda row: (row["line"], row["batch_size"]))
            if row[field] is not None
        ]  # fmt: skip
        fitting = list({(row["line"], row["x"]): row for row in sized if row["fits"]}.values())
        memory = field == "drawn_bytes"
        marked = (
            *crosses([row for row in sized if not row["fits"]], MISSED),
            rings([row for row in fitting if row.get("chosen")], _TAKEN),
            limit_line(unit.of(limit_bytes) if memory else None),
        )
        chart = line_chart(
            title, fitting, x=Axis("batch size", "sizes"), y=Axis(title, "zero"), series=series, marked=marked,
            note=note if memory else "",
        )  # fmt: skip
        charts.append(chart)
    return present(*charts)


def _place(row: Mapping[str, Any]) -> str:
    size = count_text(row["batch_size"])
    return f"{size} at {row['short']}" if "short" in row else size
