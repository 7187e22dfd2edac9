"""Accuracy against cost: the front that nothing beats, and the point to take on it, marked and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import chart_of, colours, padded, shapes, spec_of, tips
from brim.reporting.charts.theme import ACCENT, INK, MUTED, SURFACE, Line, series_colour

__all__ = ["draw_front", "draw_fronts"]

_MOST_NAMES = 16  # points on the front that are each named
_LONGEST_NAME = 3  # characters


def draw_front(rows: Sequence[Row], *, x_title: str, y_title: str, what: str) -> Spec:
    """Rows with `cost`, `y`, `low`, `high`, `front`, `chosen`, `short`; for hovering `label`, `shown`, `cost_shown`."""
    x, y = _axes(rows, x_title)
    front = [row for row in rows if row["front"]]
    hover = tips({"label": what, "shown": y_title, "cost_shown": x_title, "roles": "role"})
    layers: list[Any] = []
    spread = [row for row in rows if row["low"] is not None]
    if spread:
        bars = chart_of(spread).mark_rule(stroke=MUTED, opacity=0.4)
        layers.append(bars.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q"))
    if len(front) > 1:
        steps = chart_of(front).mark_line(interpolate="step-after", stroke=series_colour(0), strokeDash=[4, 3])
        layers.append(steps.encode(x=x, y=y))
    for some, fill in ((False, SURFACE), (True, series_colour(0))):
        mine = [row for row in rows if row["front"] == some and not row["chosen"]]
        if mine:
            stroke = series_colour(0) if some else MUTED
            mark = chart_of(mine).mark_point(size=48, opacity=1, filled=True, fill=fill, stroke=stroke)
            layers.append(mark.encode(x=x, y=y, tooltip=hover))
    layers += _names([row for row in front if not row["chosen"]], x)
    layers += _chosen(rows, x, y, hover)
    return spec_of(*layers, height=300)


def draw_fronts(rows: Sequence[Row], *, lines: Sequence[Line], x_title: str, y_title: str, what: str) -> Spec:
    """Several profiles' points in one plane, each with its own front; `line` says whose a row is."""
    x, y = _axes(rows, x_title)
    hover = tips({"line": "run", "label": what, "shown": y_title, "cost_shown": x_title})
    steps = chart_of([row for row in rows if row["front"]]).mark_line(interpolate="step-after", strokeDash=[4, 3])
    points = chart_of(rows).mark_point(size=48, opacity=1, filled=True)
    return spec_of(
        steps.encode(x=x, y=y, color=colours(lines)),
        points.encode(x=x, y=y, color=colours(lines), shape=shapes(lines), tooltip=hover),
        height=300,
    )


def _axes(rows: Sequence[Row], x_title: str) -> tuple[Any, Any]:
    costs = [row["cost"] for row in rows]
    heights = [row[field] for row in rows for field in ("y", "low", "high") if row.get(field) is not None]
    low, high = padded(min(heights, default=0.0), max(heights, default=1.0), 0.1)
    high += (high - low) * 0.12  # room for the name of the point to take
    x = alt.X(
        "cost:Q",
        title=x_title,
        scale=alt.Scale(domain=padded(min(costs, default=0.0), max(costs, default=1.0), 0.07), nice=False, zero=False),
        axis=alt.Axis(format=",~r", labelOverlap="greedy"),
    )
    return x, alt.Y("y:Q", title=None, scale=alt.Scale(domain=[low, high], nice=False, zero=False))


def _names(front: Sequence[Row], x: Any) -> list[Any]:
    """The points' own names, where they are short and few enough to be read."""
    if len(front) > _MOST_NAMES or any(len(row["short"]) > _LONGEST_NAME for row in front) or not front:
        return []
    return [chart_of(_topped(front)).mark_text(dy=-9, fill=MUTED).encode(x=x, y="top:Q", text="short:N")]


def _topped(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with the upper end of what is drawn of them: names stand above it."""
    return [{**row, "top": row["y"] if row["high"] is None else row["high"]} for row in rows]


def _chosen(rows: Sequence[Row], x: Any, y: Any, hover: Any) -> list[Any]:
    """The point to take: a diamond, and its name on the side where there is room."""
    chosen = [row for row in rows if row["chosen"]]
    if not chosen:
        return []
    costs = [row["cost"] for row in rows]
    middle = (min(costs) + max(costs)) / 2
    right = chosen[0]["cost"] > middle
    name = {"align": "right" if right else "left", "dx": 4 if right else -4, "dy": -24, "fontWeight": "bold"}
    named = chart_of([{**row, "name": f"recommended: {row['short']}"} for row in _topped(chosen)])
    mark = chart_of(chosen).mark_point(
        shape="diamond", size=200, filled=True, fill=ACCENT, stroke=SURFACE, opacity=1, description="recommended"
    )
    halo = named.mark_text(**name, stroke=SURFACE, strokeWidth=4, strokeJoin="round", limit=260)
    return [
        mark.encode(x=x, y=y, tooltip=hover),
        halo.encode(x=x, y="top:Q", text="name:N"),
        named.mark_text(**name, fill=INK, limit=260).encode(x=x, y="top:Q", text="name:N"),
    ]
