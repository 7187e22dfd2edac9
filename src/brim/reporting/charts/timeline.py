"""A figure of the machine over the time of a run, with the stretch that each value took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import amount_axis, chart_of, spec_of, tips
from brim.reporting.charts.theme import HEIGHT, LIMIT, MUTED, series_colour
from brim.reporting.rows.trace import Stretch

__all__ = ["draw_timeline", "time_unit"]

_LONGEST_NAME = 4  # characters that fit above a narrow stretch
_MOST_STRETCHES = 24  # more boundaries would hide the curve
_NARROWEST = 0.05  # of the axis, for a name above it


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis so long, and its seconds."""
    if seconds < 180:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def draw_timeline(
    rows: Sequence[Row], stretches: Sequence[Stretch], *, most: float | None = None, limit: float | None = None,
    percent: bool = False,
) -> Spec:  # fmt: skip
    """Rows with `seconds`, `y`, and for hovering `label` and `shown`; `most` is the end of the vertical axis."""
    end = max((row["seconds"] for row in rows), default=1.0)
    unit, size = time_unit(end)
    drawn = [{**row, "time": row["seconds"] / size} for row in rows if row["y"] is not None]
    domain = alt.Scale(domain=[0, (end / size) or 1], nice=False)
    x = alt.X("time:Q", title=f"time ({unit})", scale=domain, axis=alt.Axis(format="~r", labelOverlap="greedy"))
    y = amount_axis("y", [row["y"] for row in drawn])
    if most is not None:
        y = alt.Y(
            "y:Q",
            title=None,
            scale=alt.Scale(domain=[0, most], nice=False),
            axis=alt.Axis(format=".0%" if percent else ",~r"),
        )
    layers: list[Any] = []
    if 1 < len(stretches) <= _MOST_STRETCHES:
        layers += _boundaries(stretches, size, x, end)
    base = chart_of(drawn)
    layers.append(base.mark_area(fill=series_colour(0), fillOpacity=0.18, line=False).encode(x=x, y=y))
    hover = tips({"label": "value", "shown": "figure"} if len(stretches) > 1 else {"shown": "figure"})
    layers.append(base.mark_line(stroke=series_colour(0), strokeWidth=1.5).encode(x=x, y=y, tooltip=hover))
    if limit is not None:
        layers.append(chart_of([{"y": limit}]).mark_rule(stroke=LIMIT, strokeDash=[6, 4]).encode(y=y))
    return spec_of(*layers, height=HEIGHT - 60)


def _boundaries(stretches: Sequence[Stretch], size: float, x: Any, end: float) -> list[Any]:
    """Where one value ends and the next begins; its name above, where it is wide enough."""
    edges = chart_of([{"time": one.start_seconds / size} for one in stretches[1:]])
    layers: list[Any] = [edges.mark_rule(stroke=MUTED, opacity=0.45, strokeDash=[2, 3], strokeWidth=1).encode(x=x)]
    names = [
        {"time": (one.start_seconds + one.end_seconds) / 2 / size, "name": one.label}
        for one in stretches
        if len(one.label) <= _LONGEST_NAME and (one.end_seconds - one.start_seconds) / (end or 1) >= _NARROWEST
    ]
    if names:
        text = chart_of(names).mark_text(dy=-8, fill=MUTED, baseline="bottom")
        layers.append(text.encode(x=x, y=alt.value(0), text="name:N"))
    return layers
