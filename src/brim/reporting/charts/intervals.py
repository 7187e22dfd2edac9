"""Figures side by side with their 95 % intervals: metrics of a run, differences between runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import chart_of, colours, padded, shapes, spec_of, tips
from brim.reporting.charts.theme import MUTED, Line

__all__ = ["draw_intervals"]

_ROW = 34  # px for each name


def draw_intervals(
    rows: Sequence[Row], *, lines: Sequence[Line], x_title: str, zero_line: bool = False, from_zero: bool = False
) -> Spec:
    """Rows with `name`, `line`, `x`, perhaps `low` and `high`, and for hovering `shown`."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    figures = [row[field] for row in rows for field in ("x", "low", "high") if row.get(field) is not None]
    if zero_line or from_zero:
        figures.append(0.0)
    low, high = padded(min(figures, default=0.0), max(figures, default=1.0), 0.06)
    domain = [0.0 if from_zero and not zero_line else low, high]
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(domain=domain, nice=False, zero=False),
              axis=alt.Axis(grid=True, format="~r", labelOverlap="greedy"))  # fmt: skip
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(grid=False, labelLimit=130))
    beside = {"yOffset": alt.YOffset("line:N", sort=[line.label for line in lines])} if len(lines) > 1 else {}
    layers: list[Any] = []
    if zero_line:
        layers.append(chart_of([{"x": 0}]).mark_rule(stroke=MUTED, strokeDash=[4, 3]).encode(x=x))
    spread = [row for row in rows if row.get("low") is not None]
    if spread:
        bars = chart_of(spread).mark_rule(strokeWidth=2)
        layers.append(bars.encode(x=alt.X("low:Q", title=x_title), x2="high:Q", y=y, color=colours(lines), **beside))
    hover = {"name": "metric", "line": "run", "shown": x_title}
    points = chart_of(rows).mark_point(size=64, filled=True, opacity=1)
    layers.append(points.encode(x=x, y=y, color=colours(lines), shape=shapes(lines), tooltip=tips(hover), **beside))
    return spec_of(
        *layers, height=max(len(names) * _ROW * max(len(lines), 1) * (1 if len(lines) == 1 else 0.7), 60).__round__()
    )
