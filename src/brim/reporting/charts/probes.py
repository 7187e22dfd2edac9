"""A batch-size search: what each size took and how fast it was; what did not fit is a cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.axes import (
    amount_axis,
    chart_of,
    colours,
    crosses,
    knob_axis,
    ring,
    shapes,
    size_axis,
    spec_of,
    tips,
)
from brim.reporting.charts.theme import INK, LIMIT, Line, series_colour
from brim.reporting.rows.points import KnobAxis

__all__ = ["draw_probes", "draw_sizes"]

_ROOMY = 16  # so many rings stand beside each other on a phone
_HOVER = {
    "label": "value",
    "size_shown": "batch size",
    "verdict": "verdict",
    "memory_shown": "reserved",
    "rate_shown": "samples/s",
}


def draw_probes(
    rows: Sequence[Row], *, lines: Sequence[Line], limits: Sequence[float] = (), size_title: str = "batch size"
) -> Spec:
    """Rows with `batch_size`, `y`, `line`, `fits`, perhaps `chosen`, and the fields of hovering."""
    known = [row for row in rows if row["y"] is not None]
    x = size_axis("batch_size", [row["batch_size"] for row in rows], title=size_title)
    y = amount_axis("y", [*(row["y"] for row in known), *limits])
    fitting = [row for row in known if row["fits"]]
    others = [row for row in known if not row["fits"]]
    layers: list[Any] = []
    for limit in limits:
        rule = chart_of([{"y": limit}]).mark_rule(stroke=LIMIT, strokeDash=[6, 4])
        layers.append(rule.encode(y=y))
    base = chart_of(fitting)
    layers.append(base.mark_line(strokeWidth=1.5, opacity=0.8).encode(x=x, y=y, color=colours(lines)))
    chosen = [row for row in fitting if row.get("chosen")]
    if chosen and len(lines) == 1:
        layers.append(ring(chosen, meaning="chosen").encode(x=x, y=y))
    points = base.mark_point(size=42, filled=True, opacity=1)
    layers.append(points.encode(x=x, y=y, color=colours(lines), shape=shapes(lines), tooltip=tips(_HOVER)))
    if others:
        layers.append(crosses(others, x, y, _HOVER))
    return spec_of(*layers)


def draw_sizes(rows: Sequence[Row], used: Sequence[Row], ceilings: Sequence[Row], *, axis: KnobAxis) -> Spec:
    """Every size that was tried at each value: a dot where it fitted, a cross where not, a ring at the one used."""
    sizes = [row["batch_size"] for row in [*rows, *used, *ceilings]]
    x, y = knob_axis(axis), size_axis("batch_size", sizes, channel=alt.Y, title=None)
    fitting = [row for row in rows if row["fits"]]
    others = [row for row in rows if not row["fits"]]
    dots = {"size": 42, "filled": True, "opacity": 1, "fill": series_colour(0)}
    layers: list[Any] = [chart_of(fitting).mark_point(**dots).encode(x=x, y=y, tooltip=tips(_HOVER))]
    if ceilings:
        line = chart_of(ceilings).mark_line(interpolate="step", stroke=LIMIT, strokeDash=[6, 4])
        layers.insert(0, line.encode(x=x, y=y))
    if used:
        layers.append(
            ring(used, colour=INK, meaning="used", size=240 if len(used) <= _ROOMY else 100).encode(
                x=x, y=y, tooltip=tips({"label": axis.title, "size_shown": "batch size used"})
            )
        )
    if others:
        layers.append(crosses(others, x, y, _HOVER))
    return spec_of(*layers)
