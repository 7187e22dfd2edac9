"""The machine while a run went on: the card's use, memory and power, or the host's where there was no card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.reporting.base import Column, Panel, Row, Section, Table
from brim.reporting.charts.timeline import draw_timeline
from brim.reporting.rows.trace import Trace, join_traces
from brim.reporting.units import byte_unit, bytes_text, duration_text, fraction_text, significant

__all__ = ["machine_section"]


def machine_section(
    traces: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], *, limit_bytes: float | None, what: str = "value"
) -> Section:
    """The section of traces by label, one after the other; it says so where there is no card, or no trace."""
    trace = join_traces(traces)
    title = "GPU use over time" if trace.gpu else "The machine over time"
    if len(trace.rows) < 2:
        return Section(title=title, paragraphs=("No trace: there is no monitor.csv with at least two samples.",))
    said = []
    if not trace.gpu:
        said.append("No GPU was seen, so these are the host's figures.")
    if len(trace.stretches) > 1:
        said.append(
            f"The values of {what} in the order they ran, pauses between them left out. Dotted lines, where there is "
            f"room for them, are where one ended and the next began."
        )
    return Section(
        title=title,
        paragraphs=tuple(said),
        panels=_gpu_panels(trace, limit_bytes) if trace.gpu else _host_panels(trace),
        table=_table(trace),
    )


def _gpu_panels(trace: Trace, limit_bytes: float | None) -> tuple[Panel, ...]:
    return tuple(
        panel
        for panel in (
            _fraction_panel(trace, "gpu_utilisation", "GPU use"),
            _bytes_panel(trace, "gpu_memory_used_bytes", "GPU memory in use", limit_bytes),
            _panel(trace, "gpu_power_watts", "GPU power (W)", lambda value: f"{significant(value)} W"),
        )
        if panel is not None
    )


def _host_panels(trace: Trace) -> tuple[Panel, ...]:
    panels = (
        _fraction_panel(trace, "host_cpu", "CPU use, of all cores"),
        _bytes_panel(trace, "process_rss_bytes", "Memory of the process", None),
    )
    return tuple(panel for panel in panels if panel is not None)


def _fraction_panel(trace: Trace, column: str, title: str) -> Panel | None:
    return _panel(trace, column, title, fraction_text, most=1.0, percent=True)


def _bytes_panel(trace: Trace, column: str, title: str, limit_bytes: float | None) -> Panel | None:
    known = trace.known(column)
    unit = byte_unit([*known, limit_bytes])
    # A limit far above what was used would flatten the curve.
    near = limit_bytes is not None and known and limit_bytes <= 4 * max(known)
    limit = unit.of(limit_bytes) if near else None
    return _panel(trace, column, f"{title} ({unit.name})", bytes_text, scale=unit.size, limit=limit)


def _panel(
    trace: Trace, column: str, title: str, show: Callable[[object], str], *, scale: float = 1.0, **more: Any
) -> Panel | None:
    known = trace.known(column)
    if not known:
        return None
    rows = [
        {
            "seconds": row["seconds"],
            "label": row["label"],
            "y": None if row[column] is None else row[column] / scale,
            "shown": show(row[column]),
        }
        for row in trace.rows
    ]
    mean = sum(known) / len(known)
    span = f"from {show(min(known))} to {show(max(known))}"
    words = f"{title} over {duration_text(trace.stretches[-1].end_seconds)}: mean {show(mean)}, {span}."
    return Panel(title=title, spec=draw_timeline(rows, trace.stretches, **more), alternative=words)


def _table(trace: Trace) -> Table:
    """One row for each stretch, or ten along a single one: enough to follow the curve."""
    parts: list[tuple[str, list[Row]]] = []
    if len(trace.stretches) > 1:
        for stretch in trace.stretches:
            rows: list[Row] = [row for row in trace.rows if row["label"] == stretch.label]
            if rows:
                parts.append((stretch.label, rows))
    else:
        step = max(len(trace.rows) // 10, 1)
        for start in range(0, len(trace.rows), step):
            rows = list(trace.rows[start : start + step])
            parts.append((f"{duration_text(rows[0]['seconds'])} to {duration_text(rows[-1]['seconds'])}", rows))
    named = "value" if len(trace.stretches) > 1 else "time"
    columns = [Column(title=named, field="name", words=True)]
    columns += [Column(title=title, field=column, show=show) for column, title, show in _columns(trace)]
    return Table(
        caption="Means over each stretch (memory: the most)",
        columns=tuple(columns),
        rows=[{"name": name, **_folded(rows, trace)} for name, rows in parts],
    ).known()


def _columns(trace: Trace) -> list[tuple[str, str, Callable[[object], str]]]:
    if trace.gpu:
        return [
            ("gpu_utilisation", "GPU use", fraction_text),
            ("gpu_memory_used_bytes", "GPU memory", bytes_text),
            ("gpu_power_watts", "power (W)", significant),
        ]
    return [("host_cpu", "CPU use", fraction_text), ("process_rss_bytes", "memory", bytes_text)]


def _folded(rows: Sequence[Row], trace: Trace) -> dict[str, float | None]:
    folded: dict[str, float | None] = {}
    for column, _, _ in _columns(trace):
        known = [row[column] for row in rows if row[column] is not None]
        folded[column] = None if not known else max(known) if column.endswith("_bytes") else sum(known) / len(known)
    return folded
