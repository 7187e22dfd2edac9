"""monitor.csv as rows to draw: several traces one after the other on one axis of time, thinned to what a screen shows.

Pure: it is given rows, and knows no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.reporting.units import number

__all__ = ["MOST_ROWS", "Stretch", "Trace", "join_traces"]

MOST_ROWS = 360  # a wide chart has about two pixels for each

# What is drawn: the column, and what stands for several of its samples.
_GPU: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu_utilisation": lambda values: sum(values) / len(values),
    "gpu_memory_used_bytes": max,
    "gpu_power_watts": lambda values: sum(values) / len(values),
}
_HOST: dict[str, Callable[[Sequence[float]], float]] = {
    "host_cpu": lambda values: sum(values) / len(values),
    "process_rss_bytes": max,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """The part of the axis that one value, or one run, took."""

    label: str
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The joined rows; `gpu` says whether the card or only the host was seen."""

    gpu: bool
    rows: list[dict[str, Any]]
    stretches: tuple[Stretch, ...]

    def known(self, column: str) -> list[float]:
        """Every figure of a column."""
        return [row[column] for row in self.rows if row.get(column) is not None]


def join_traces(traces: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Trace:
    """One after the other, pauses between them left out; of the card where any of them saw one, else of the host."""
    gpu = any(number(row.get("gpu_utilisation")) is not None for _, rows in traces for row in rows)
    columns = _GPU if gpu else _HOST
    joined: list[dict[str, Any]] = []
    stretches: list[Stretch] = []
    start = 0.0
    for label, rows in traces:
        if not rows:
            continue
        first = float(rows[0]["time_seconds"])
        moved = [{**row, "seconds": start + float(row["time_seconds"]) - first} for row in rows]
        end = max(row["seconds"] for row in moved)
        joined += [{"label": label, **row} for row in moved]
        stretches.append(Stretch(label=label, start_seconds=start, end_seconds=end))
        start = end
    return Trace(gpu=gpu, rows=_thinned(joined, columns), stretches=tuple(stretches))


def _thinned(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Sequence[float]], float]]
) -> list[dict[str, Any]]:
    """At most `MOST_ROWS` rows, each standing for an equal span of time."""
    if not rows:
        return []
    span = max(row["seconds"] for row in rows) / MOST_ROWS or 1.0
    bins: dict[int, list[Mapping[str, Any]]] = {}
    for sample in rows:
        bins.setdefault(min(int(sample["seconds"] / span), MOST_ROWS - 1), []).append(sample)
    thinned = []
    for _, group in sorted(bins.items()):
        row: dict[str, Any] = {"seconds": sum(one["seconds"] for one in group) / len(group), "label": group[0]["label"]}
        for column, fold in columns.items():
            known = [figure for one in group if (figure := number(one.get(column))) is not None]
            row[column] = fold(known) if known else None
        thinned.append(row)
    return thinned
