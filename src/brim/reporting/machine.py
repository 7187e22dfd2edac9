"""The machine during a run: the card's use, memory and power, or the host's where there was no card.

Several traces follow each other on one axis of time, thinned to what a screen shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.reporting.base import Column, PageTable, Section, present, words
from brim.reporting.charts import Axis, Chart, Row, limit_line, time_chart
from brim.units import byte_unit, bytes_text, duration_text, fraction_text, number, significant

__all__ = ["MOST_ROWS", "MachineTrace", "join_traces", "machine_section"]

MOST_ROWS = 360  # a wide chart has about two pixels for each


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A column of monitor.csv: what it is called, how it is written, and what stands for several samples of it."""

    column: str
    title: str
    short: str  # in the table
    show: Callable[[object], str]
    fold: Callable[[Sequence[float]], float] = _mean
    scale: str = "zero"


def _watts(value: object) -> str:
    return f"{significant(value)} W"


_GPU = (
    _Measured("gpu_utilisation", "GPU use", "GPU use", fraction_text, scale="percent"),
    _Measured("gpu_memory_used_bytes", "GPU memory in use", "GPU memory", bytes_text, max),
    _Measured("gpu_power_watts", "GPU power (W)", "power", _watts),
)
_HOST = (
    _Measured("host_cpu", "CPU use, of all cores", "CPU use", fraction_text, scale="percent"),
    _Measured("process_rss_bytes", "Memory of the process", "memory", bytes_text, max),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineTrace:
    """The joined rows; `gpu` says whether the card or only the host was seen."""

    gpu: bool
    rows: list[dict[str, Any]]
    stretches: tuple[tuple[str, float, float], ...]  # who ran, from and to which second

    @property
    def measured(self) -> tuple[_Measured, ...]:
        return _GPU if self.gpu else _HOST

    def known(self, column: str) -> list[float]:
        """Every figure of a column."""
        return [row[column] for row in self.rows if row.get(column) is not None]


def join_traces(traces: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> MachineTrace:
    """One after the other, pauses between them left out; of the card where any of them saw one, else of the host."""
    gpu = any(number(row.get("gpu_utilisation")) is not None for _, rows in traces for row in rows)
    joined: list[dict[str, Any]] = []
    stretches: list[tuple[str, float, float]] = []
    start = 0.0
    for label, rows in traces:
        if not rows:
            continue
        first = float(rows[0]["time_seconds"])
        moved = [{"label": label, **row, "seconds": start + float(row["time_seconds"]) - first} for row in rows]
        end = max(row["seconds"] for row in moved)
        joined += moved
        stretches.append((label, start, end))
        start = end
    return MachineTrace(gpu=gpu, rows=_thinned(joined, _GPU if gpu else _HOST), stretches=tuple(stretches))


def _thinned(rows: Sequence[Mapping[str, Any]], measured: Sequence[_Measured]) -> list[dict[str, Any]]:
    """At most `MOST_ROWS` rows, each standing for an equal span of time."""
    span = max((row["seconds"] for row in rows), default=0.0) / MOST_ROWS or 1.0
    bins: dict[int, list[Mapping[str, Any]]] = {}
    for sample in rows:
        bins.setdefault(min(int(sample["seconds"] / span), MOST_ROWS - 1), []).append(sample)
    return [
        {"seconds": _mean([one["seconds"] for one in group]), "label": group[0]["label"], **_folded(group, measured)}
        for _, group in sorted(bins.items())
    ]


def _folded(rows: Sequence[Mapping[str, Any]], measured: Sequence[_Measured]) -> dict[str, float | None]:
    known = {
        one.column: [figure for row in rows if (figure := number(row.get(one.column))) is not None] for one in measured
    }
    return {one.column: one.fold(known[one.column]) if known[one.column] else None for one in measured}


def machine_section(
    traces: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], *, limit_bytes: float | None, what: str = "value"
) -> Section:
    """The section of traces by label; it says so where there is no card, or no trace."""
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
            "room for them, are where one ended and the next began."
        )
    charts = present(*(_chart(trace, one, limit_bytes) for one in trace.measured))
    return Section(title=title, paragraphs=tuple(said), charts=charts, table=_table(trace))


def _chart(trace: MachineTrace, measured: _Measured, limit_bytes: float | None) -> Chart | None:
    known = trace.known(measured.column)
    if not known:
        return None
    size, title, limit = 1.0, measured.title, None
    if measured.show is bytes_text:
        # A limit far above what was used would flatten the curve.
        near = limit_bytes if trace.gpu and limit_bytes is not None and limit_bytes <= 4 * max(known) else None
        unit = byte_unit([*known, near])
        size, title, limit = unit.size, f"{title} ({unit.name})", unit.of(near)
    rows = [
        {**row, "y": row[measured.column] / size, "shown": measured.show(row[measured.column])}
        for row in trace.rows
        if row[measured.column] is not None
    ]
    low, mean, high = (measured.show(figure) for figure in (min(known), _mean(known), max(known)))
    caption = f"{title} over {duration_text(trace.stretches[-1][2])}: mean {mean}, from {low} to {high}."
    axis = Axis("", "percent" if measured.scale == "percent" else "zero")
    return time_chart(title, rows, y=axis, stretches=trace.stretches, limit=limit_line(limit), caption=caption)


def _table(trace: MachineTrace) -> PageTable:
    """One row for each stretch, or ten along a single one: enough to follow the curve."""
    several = len(trace.stretches) > 1
    parts: list[tuple[str, list[Row]]] = []
    if several:
        parts = [(label, [row for row in trace.rows if row["label"] == label]) for label, _, _ in trace.stretches]
    else:
        step = max(len(trace.rows) // 10, 1)
        groups: list[list[Row]] = [list(trace.rows[at : at + step]) for at in range(0, len(trace.rows), step)]
        parts = [(" to ".join(duration_text(rows[end]["seconds"]) for end in (0, -1)), rows) for rows in groups]
    return PageTable(
        "Means over each stretch (memory: the most)",
        (
            words("value" if several else "time", "name"),
            *(Column(one.short, one.column, one.show) for one in trace.measured),
        ),
        [{"name": name, **_folded(rows, trace.measured)} for name, rows in parts if rows],
    )
