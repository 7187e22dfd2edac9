"""Methods side by side: the mean over seeds, its deviation, and each seed's own value beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import chart_of, colours, padded, shapes, spec_of, tips
from brim.reporting.charts.theme import MUTED, Line

__all__ = ["draw_spreads"]

_ROW = 30  # px for each name and line
_LEAST = 90  # px


def draw_spreads(
    rows: Sequence[Row],
    dots: Sequence[Row],
    *,
    lines: Sequence[Line],
    x_title: str,
    what: str,
    rule: float | None = None,
) -> Spec:
    """Rows with `name`, `line`, `x`, perhaps `low` and `high`, and `shown`; dots with `name`, `line`, `x`, `seed`.

    `rule` is a figure worth a line of its own, such as that of chance.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    figures = [row[field] for row in [*rows, *dots] for field in ("x", "low", "high") if row.get(field) is not None]
    low, high = padded(min(figures, default=0.0), max(figures, default=1.0), 0.06)
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(domain=[low, high], nice=False, zero=False),
              axis=alt.Axis(grid=True, format="~g", labelOverlap="parity"))  # fmt: skip
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(grid=False, labelLimit=140))
    beside = {"yOffset": alt.YOffset("line:N", sort=[line.label for line in lines])} if len(lines) > 1 else {}
    layers: list[Any] = []
    if rule is not None and low <= rule <= high:
        layers.append(chart_of([{"x": rule}]).mark_rule(stroke=MUTED, strokeDash=[4, 3]).encode(x=x))
    if dots:
        ticks = chart_of(dots).mark_tick(thickness=1.5, size=13, opacity=0.55, orient="vertical")
        hover = tips({"name": what, "line": "data", "seed": "seed", "shown": x_title})
        layers.append(ticks.encode(x=x, y=y, color=colours(lines), tooltip=hover, **beside))
    spread = [row for row in rows if row.get("low") is not None]
    if spread:
        bars = chart_of(spread).mark_rule(strokeWidth=2)
        layers.append(bars.encode(x=alt.X("low:Q", title=x_title), x2="high:Q", y=y, color=colours(lines), **beside))
    points = chart_of(rows).mark_point(size=64, filled=True, opacity=1)
    hover = tips({"name": what, "line": "data", "shown": x_title})
    layers.append(points.encode(x=x, y=y, color=colours(lines), shape=shapes(lines), tooltip=hover, **beside))
    return spec_of(*layers, height=max(len(names) * max(len(lines), 1) * _ROW, _LEAST))
