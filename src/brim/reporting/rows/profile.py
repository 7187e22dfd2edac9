"""What is drawn and tabled of a profile: rows of accuracy, speed, memory, latency, and the front. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.reporting.rows.points import Point
from brim.reporting.units import ByteUnit, interval_text, number, significant

__all__ = [
    "COSTS", "PARTS", "Cost", "Recommended", "accuracy_row", "cost_of", "front_rows", "latency_rows", "memory_rows",
    "recommended",
]  # fmt: skip

PARTS = ("vision", "prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """A quantity that accuracy is weighed against: less is better."""

    title: str
    unit: str

    def text(self, value: object) -> str:
        """The figure with its unit."""
        return f"{significant(value)} {self.unit}".strip()


COSTS = {
    "seconds_per_sample": Cost(title="time per sample", unit="ms"),
    "latency_ms": Cost(title="latency at batch 1 (p50)", unit="ms"),
    "peak_reserved_bytes": Cost(title="peak reserved memory", unit="GiB"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommended:
    """Which points the profile recommends, by their place in the summary."""

    cost: str
    front: tuple[int, ...]
    chosen: int | None  # the one to take
    roles: Mapping[int, tuple[str, ...]]  # in words: recommended, most accurate, …
    sentences: tuple[str, ...]


def recommended(profile: Mapping[str, Any]) -> Recommended:
    """The recommendation of the document; without one, nothing is chosen."""
    given = profile.get("recommendation")
    given = given if isinstance(given, dict) else {}
    count = len(profile["summary"])

    def place(field: str) -> int | None:
        index = given.get(field)
        return index if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count else None

    within, best = place("cheapest_within"), place("best")
    chosen = best if within is None else within
    roles: dict[int, tuple[str, ...]] = {}
    named = (
        (chosen, "recommended"), (best, "most accurate"), (place("cheapest_meeting_latency"), "meets the latency"),
        (place("cheapest_meeting_memory"), "meets the memory"),
    )  # fmt: skip
    for index, role in named:
        if index is not None:
            roles[index] = (*roles.get(index, ()), role)
    front = given.get("front")
    sentences = given.get("text")
    return Recommended(
        cost=str(given.get("cost") or "seconds_per_sample"),
        front=tuple(i for i in front if isinstance(i, int) and 0 <= i < count) if isinstance(front, list) else (),
        chosen=chosen,
        roles=roles,
        sentences=tuple(str(line) for line in sentences) if isinstance(sentences, list) else (),
    )


def accuracy_row(point: Point) -> dict[str, Any]:
    """A point's accuracy with the ends of its interval."""
    value, half = point.figure("accuracy"), point.figure("accuracy_ci95")
    ends = (None, None) if value is None or half is None else (value - half, value + half)
    return {
        **point.place(),
        "y": value,
        "low": ends[0],
        "high": ends[1],
        "saturated": bool(point.entry.get("saturated")),
        "shown": interval_text(value, half),
    }


def cost_of(point: Point, cost: str) -> float | None:
    """What the point costs, in the unit of `COSTS`."""
    if cost == "seconds_per_sample":
        rate = point.figure("samples_per_second")
        return 1000 / rate if rate else None
    if cost == "latency_ms":
        return _percentile(point, "batch_1", "total", "p50")
    if cost == "peak_reserved_bytes":
        return ByteUnit(name="GiB", size=2**30).of(point.figure(cost))
    return point.figure(cost)


def front_rows(points: Sequence[Point], choice: Recommended) -> list[dict[str, Any]]:
    """Every point that has both an accuracy and a cost, and what it is: its roles, and whether it is on the front."""
    rows = []
    for point in points:
        row = {**accuracy_row(point), "cost": cost_of(point, choice.cost)}
        if row["y"] is None or row["cost"] is None:
            continue
        roles = choice.roles.get(point.index, ())
        row |= {"front": point.index in choice.front, "chosen": point.index == choice.chosen, "roles": ", ".join(roles)}
        rows.append(row)
    return rows


def memory_rows(points: Sequence[Point], unit: ByteUnit) -> list[dict[str, Any]]:
    """Allocated, reserved and the limit of each point, in one unit."""
    return [
        {
            **point.place(),
            "allocated": unit.of(point.figure("peak_allocated_bytes")),
            "reserved": unit.of(point.figure("peak_reserved_bytes")),
            "limit": unit.of(point.figure("limit_bytes")),
        }
        for point in points
    ]


def latency_rows(points: Sequence[Point], batch: str) -> list[dict[str, Any]]:
    """The median of each part, stacked, and the percentiles of the whole; a point without a latency has no row.

    `batch` is `batch_1` or `batch_used`. Where no part is known, the whole is one part.
    """
    rows = []
    for point in points:
        total = {name: _percentile(point, batch, "total", name) for name in ("p50", "p95", "p99")}
        parts = {part: _percentile(point, batch, part, "p50") for part in PARTS}
        if total["p50"] is None and all(value is None for value in parts.values()):
            continue
        rows.append({**point.place(), **total, **parts, "batch_size": _batch_size(point, batch)})
    return rows


def _latency(point: Point, batch: str) -> Mapping[str, Any]:
    latency = point.entry.get("latency_ms")
    figures = latency.get(batch) if isinstance(latency, dict) else None
    return figures if isinstance(figures, dict) else {}


def _percentile(point: Point, batch: str, part: str, name: str) -> float | None:
    figures = _latency(point, batch).get(part)
    return number(figures.get(name)) if isinstance(figures, dict) else None


def _batch_size(point: Point, batch: str) -> float | None:
    return number(_latency(point, batch).get("batch_size"))
