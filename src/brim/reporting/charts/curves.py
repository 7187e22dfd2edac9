"""Curves over samples, epochs or time: dense lines bare, coarse ones with their points, and crosses for what failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from brim.reporting.base import Key, Row, Spec
from brim.reporting.charts.axes import (
    amount_axis,
    chart_of,
    colours,
    crosses,
    dashes,
    padded,
    shapes,
    size_axis,
    spec_of,
    tips,
)
from brim.reporting.charts.theme import LIMIT, Line

__all__ = ["curve_key", "draw_curves"]

MOST_POINTS = 60  # of a line: more are not told apart
LOG_FROM = 30.0  # the highest over the lowest, from where on a curve is drawn by multiples

Vertical = Literal["amount", "close", "sizes"]  # from zero; near the figures, perhaps by multiples; batch sizes


def draw_curves(
    rows: Sequence[Row],
    *,
    lines: Sequence[Line],
    x_title: str,
    title: str,
    vertical: Vertical = "close",
    fine: Sequence[Row] = (),
    failed: Sequence[Row] = (),
    limit: float | None = None,
    stepped: bool = False,
    whole: bool = False,
) -> Spec:
    """Rows with `x`, `y`, `line`, and for hovering `label` and `shown`; a line of few rows has its points drawn.

    `fine` is drawn faint behind. `failed` rows have `x`, `y` and a `reason`. With `whole` the axis counts (epochs).
    """
    figures = [row["y"] for row in [*rows, *fine, *failed]] + ([] if limit is None else [limit])
    places = [row["x"] for row in [*rows, *fine, *failed]]
    x, y = _horizontal(places, x_title, whole=whole), _vertical(figures, vertical)
    layers: list[Any] = []
    if limit is not None:
        layers.append(chart_of([{"y": limit}]).mark_rule(stroke=LIMIT, strokeDash=[6, 4]).encode(y=y))
    if fine:
        faint = chart_of(fine).mark_line(strokeWidth=1, opacity=0.35)
        layers.append(faint.encode(x=x, y=y, color=colours(lines), detail="line:N"))
    shape = {"interpolate": "step-after"} if stepped else {}
    layers.append(chart_of(rows).mark_line(**shape).encode(x=x, y=y, color=colours(lines), strokeDash=dashes(lines)))
    layers += _points(rows, x, y, lines, {"label": x_title, "line": "line", "shown": title})
    if failed:
        layers.append(crosses(failed, x, y, {"label": x_title, "reason": "what happened"}))
    return spec_of(*layers)


def curve_key(line: Line, *, points: bool) -> Key:
    """Its entry in the legend: a symbol where points are drawn, else a stroke."""
    return Key(label=line.label, colour=line.colour, mark=line.shape if points else "dashed" if line.dash else "line")


def _points(rows: Sequence[Row], x: Any, y: Any, lines: Sequence[Line], hover: dict[str, str]) -> list[Any]:
    """Symbols on coarse lines; on dense ones only places that can be hovered over."""
    counts = {line.label: sum(row["line"] == line.label for row in rows) for line in lines}
    layers = []
    for seen in (False, True):
        own = [row for row in rows if _pointed(counts[row["line"]], lines, row) == seen]
        if own:
            marks = chart_of(own).mark_point(size=44 if seen else 70, opacity=1 if seen else 0, filled=True)
            layers.append(marks.encode(x=x, y=y, color=colours(lines), shape=shapes(lines), tooltip=tips(hover)))
    return layers


def _pointed(count: int, lines: Sequence[Line], row: Row) -> bool:
    """Whether a row's symbol is drawn; a line of one row would not be seen without."""
    bare = any(line.bare for line in lines if line.label == row["line"])
    return count == 1 or (count <= MOST_POINTS and not bare)


def _horizontal(places: Sequence[float], title: str, *, whole: bool) -> Any:
    low, high = min(places, default=0.0), max(places, default=1.0)
    domain = padded(low, high, 0.04) if whole else [0.0, 1.012 * high or 1.0]  # a symbol at the end stays whole
    counted: dict[str, Any] = {"tickMinStep": 1} if whole else {}
    labels = alt.Axis(format=".3~s" if high >= 100_000 else ",~r", labelOverlap="greedy", **counted)
    return alt.X("x:Q", title=title, scale=alt.Scale(domain=domain, nice=False, zero=False), axis=labels)


def _vertical(figures: Sequence[float], kind: Vertical) -> Any:
    if kind == "sizes":
        return size_axis("y", figures, channel=alt.Y, title=None)
    if kind == "amount" or not figures:
        return amount_axis("y", figures)
    low, high = min(figures), max(figures)
    if low > 0 and high / low >= LOG_FROM:
        scale = alt.Scale(type="log", domain=[low / 1.15, high * 1.15], nice=False)
        return alt.Y("y:Q", title=None, scale=scale, axis=alt.Axis(format="~g", values=_multiples(low, high)))
    scale = alt.Scale(domain=padded(low, high, 0.06), nice=True, zero=False)
    return alt.Y("y:Q", title=None, scale=scale, axis=alt.Axis(format="~g"))


def _multiples(low: float, high: float) -> list[float]:
    """Powers of ten between two figures, not more than half a dozen; where there are few, their doubles and fives."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 3 else (1,)
    found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    return found[:: math.ceil(len(found) / 6) or 1]
