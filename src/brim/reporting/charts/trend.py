"""A quantity over the knob: lines, intervals, the point to take, and the values that failed."""

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
    dashes,
    knob_axis,
    padded,
    ring,
    shapes,
    size_axis,
    spec_of,
    tips,
)
from brim.reporting.charts.theme import HEIGHT, MUTED, SURFACE, Line
from brim.reporting.rows.points import KnobAxis

__all__ = ["draw_trend"]


def draw_trend(
    rows: Sequence[Row],
    *,
    axis: KnobAxis,
    lines: Sequence[Line],
    title: str,
    from_zero: bool = True,
    sizes: bool = False,
    zero_rule: bool = False,
    failed: Sequence[Row] = (),
) -> Spec:
    """Rows with `x`, `line`, `y`, perhaps `low` and `high`, and what hovering shows: `label`, `shown`.

    A row that is `chosen` is ringed, one that is `saturated` is hollow. `failed` rows have an `x` and a `reason`.
    With `sizes` the vertical axis is one of batch sizes; with `zero_rule` zero is drawn as a line.
    """
    known = [row for row in rows if row["y"] is not None]
    x, y = knob_axis(axis), _vertical(known, from_zero=from_zero, sizes=sizes)
    hover = {"label": axis.title if axis.numeric else "point", "line": "line", "shown": title}
    if len(lines) == 1:
        del hover["line"]
    layers: list[Any] = []
    if zero_rule:
        layers.append(chart_of([{"y": 0}]).mark_rule(stroke=MUTED, strokeDash=[4, 3], strokeWidth=1).encode(y=y))
    if any(row.get("low") is not None for row in known):
        spread = chart_of([row for row in known if row.get("low") is not None])
        layers.append(
            spread.mark_rule(opacity=0.55).encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=colours(lines))
        )
    bare = {line.label for line in lines if line.bare}
    layers += [_bare(line, [row for row in known if row["line"] == line.label], x, y) for line in lines if line.bare]
    own = [row for row in known if row["line"] not in bare]
    if axis.numeric:  # words have no order that a line could follow
        layers.append(chart_of(own).mark_line().encode(x=x, y=y, color=colours(lines), strokeDash=dashes(lines)))
    layers += _points(own, x, y, lines, hover)
    if failed:
        bottom = alt.value(HEIGHT - 7)
        layers.append(crosses(failed, x, bottom, {"label": axis.title, "reason": "not measured"}))
    return spec_of(*layers)


def _bare(line: Line, rows: Sequence[Row], x: Any, y: Any) -> Any:
    """A limit or a ceiling: across the whole chart where it is one figure, else from value to value."""
    look = {"stroke": line.colour, "strokeDash": list(line.dash), "strokeWidth": 1.5}
    if len({row["y"] for row in rows}) == 1:
        return chart_of(rows[:1]).mark_rule(**look).encode(y=y)
    return chart_of(rows).mark_line(**look).encode(x=x, y=y)


def _points(rows: Sequence[Row], x: Any, y: Any, lines: Sequence[Line], hover: dict[str, str]) -> list[Any]:
    """A ring around the point to take, then filled points, then hollow ones."""
    layers: list[Any] = []
    chosen = [row for row in rows if row.get("chosen")]
    if chosen:
        layers.append(ring(chosen).encode(x=x, y=y))
    by_line = {"shape": shapes(lines), "stroke": colours(lines, channel=alt.Stroke)}
    for hollow in (False, True):
        some = [row for row in rows if bool(row.get("saturated")) == hollow]
        if some:
            fill = alt.value(SURFACE) if hollow else colours(lines, channel=alt.Fill)
            mark = chart_of(some).mark_point(size=48, opacity=1, filled=True)
            layers.append(mark.encode(x=x, y=y, fill=fill, tooltip=tips(hover), **by_line))
    return layers


def _vertical(rows: Sequence[Row], *, from_zero: bool, sizes: bool) -> Any:
    figures = [row[field] for row in rows for field in ("y", "low", "high") if row.get(field) is not None]
    if sizes:
        return size_axis("y", figures, channel=alt.Y, title=None)
    if from_zero or not figures:
        return amount_axis("y", figures)
    domain = padded(min(figures), max(figures), 0.12)
    return alt.Y("y:Q", title=None, scale=alt.Scale(domain=domain, nice=True, zero=False))
