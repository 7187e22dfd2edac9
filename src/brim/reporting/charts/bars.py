"""Bars: parts of a whole, one bar for each point; and how often something fell into each span."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import amount_axis, chart_of, colours, spec_of, tips
from brim.reporting.charts.theme import INK, SURFACE, Line, series_colour

__all__ = ["draw_counts", "draw_histogram", "draw_stacks"]

_MOST_LABELS = 24


def draw_stacks(
    rows: Sequence[Row], ticks: Sequence[Row], *, lines: Sequence[Line], x_title: str, tick_title: str
) -> Spec:
    """Rows with `short`, `part`, `place` (0 at the bottom) and `y`; `ticks` are marks above the bars, at their `y`."""
    names = list(dict.fromkeys(row["short"] for row in [*rows, *ticks]))
    long = max((len(name) for name in names), default=0) > 6 or len(names) > _MOST_LABELS
    labels = alt.Axis(labelAngle=-40 if long else 0, labelLimit=150, labelOverlap="greedy")
    x = alt.X("short:O", sort=names, title=x_title, axis=labels, scale=alt.Scale(paddingInner=0.3, paddingOuter=0.2))
    heights = [row["y"] for row in [*rows, *ticks]]
    y = amount_axis("y", heights)
    narrow = {"size": 56} if len(names) <= 3 else {}  # px: three bars need not fill the page
    bars = chart_of(rows).mark_bar(stroke=SURFACE, strokeWidth=1, **narrow)
    hover = {"label": x_title, "part": "part", "shown": "median"}
    layers = [bars.encode(x=x, y=y, color=colours(lines, "part"), order="place:Q", tooltip=tips(hover))]
    if ticks:
        marks = chart_of(ticks).mark_tick(thickness=2.5, fill=INK, **narrow)
        layers.append(marks.encode(x=x, y=y, tooltip=tips({"label": x_title, "shown": tick_title})))
    return spec_of(*layers)


def draw_histogram(rows: Sequence[Row], *, x_title: str, y_title: str) -> Spec:
    """Rows with `low`, `high`, `count` and, for hovering, `span`."""
    bars = chart_of(rows).mark_bar(fill=series_colour(0), stroke=SURFACE, strokeWidth=1)
    labels = alt.Axis(format=",~r", labelOverlap="greedy")
    x = alt.X("low:Q", bin="binned", title=x_title, axis=labels, scale=alt.Scale(nice=False, zero=False))
    encoded = bars.encode(
        x=x, x2="high:Q", y=amount_axis("count", [row["count"] for row in rows]),
        tooltip=tips({"span": x_title, "count_shown": y_title}),
    )  # fmt: skip
    return spec_of(encoded)


def draw_counts(rows: Sequence[Row], *, x_title: str, y_title: str) -> Spec:
    """Rows with `span`, in order, and `count`."""
    names = [row["span"] for row in rows]
    long = max((len(name) for name in names), default=0) * len(names) > 36
    x = alt.X("span:O", sort=names, title=x_title, axis=alt.Axis(labelAngle=-40 if long else 0, labelOverlap="greedy"))
    narrow = {"size": 56} if len(names) <= 3 else {}
    bars = chart_of(rows).mark_bar(fill=series_colour(0), stroke=SURFACE, strokeWidth=1, **narrow)
    y = amount_axis("count", [row["count"] for row in rows])
    return spec_of(bars.encode(x=x, y=y, tooltip=tips({"span": x_title, "count_shown": y_title})))
