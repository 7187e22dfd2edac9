"""What charts share: axes, scales by line, marks for what failed or was chosen, and the way to a specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from brim.reporting.base import Row, Spec
from brim.reporting.charts.theme import ACCENT, BAD, CROSS, HEIGHT, Line
from brim.reporting.rows.points import KnobAxis

__all__ = [
    "amount_axis", "chart_of", "colours", "crosses", "dashes", "knob_axis", "padded", "ring", "shapes", "size_axis",
    "spec_of", "tips", "vega_lite_version",
]  # fmt: skip

_MOST_TICKS = 16  # so many values are each worth a tick


def chart_of(rows: Sequence[Row]) -> Any:
    """A chart of rows that travel inside the page; Altair's own types of marks and channels help nobody here."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def spec_of(*layers: Any, height: int = HEIGHT) -> Spec:
    """The layers as one specification, as wide as the place it stands in."""
    chart = alt.layer(*layers).properties(width="container", height=height)
    spec: Spec = chart.to_dict()
    del spec["config"]  # one for all charts: see theme.CONFIG
    del spec["$schema"]
    used: set[str] = set().union(*(_fields(layer["encoding"]) for layer in spec["layer"]))
    for name, rows in spec["datasets"].items():
        spec["datasets"][name] = [{field: _short(row[field]) for field in row if field in used} for row in rows]
    return spec


def _short(value: Any) -> Any:
    """A figure with the digits that a screen can show."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _fields(encoding: Mapping[str, Any]) -> set[str]:
    """The fields that a layer draws or tells; a page need not carry the others."""
    channels = [one for channel in encoding.values() for one in (channel if isinstance(channel, list) else [channel])]
    return {channel["field"] for channel in channels if "field" in channel}


def vega_lite_version() -> str:
    """The Vega-Lite that the specifications are written for, such as `v6.4.1`."""
    return alt.SCHEMA_VERSION


def knob_axis(axis: KnobAxis) -> Any:
    """The knob on the horizontal axis: at its own values where they are few."""
    if not axis.numeric:
        long = max((len(str(value)) for value in axis.values), default=0) > 6
        labels = alt.Axis(labelAngle=-35 if long else 0, labelLimit=150, labelOverlap="greedy")
        return alt.X("x:O", sort=list(axis.values), title=axis.title, axis=labels)
    low, high = axis.values[0], axis.values[-1]
    if axis.scale == "log":
        scale = alt.Scale(type="log", domain=[low / 1.12, high * 1.12], nice=False)
    else:
        scale = alt.Scale(domain=padded(low, high, 0.04), nice=False, zero=False)
    ticks = _at(axis.values) if len(axis.values) <= _MOST_TICKS else {}
    labels = alt.Axis(format=_number_format(high), labelOverlap="greedy", **ticks)
    return alt.X("x:Q", title=axis.title, scale=scale, axis=labels)


def size_axis(field: str, sizes: Sequence[float], *, channel: Any = alt.X, title: str | None) -> Any:
    """Batch sizes: in doublings where they span several, else evenly."""
    low, high = min(sizes, default=1), max(sizes, default=1)
    if low > 0 and high / low >= 8:
        scale = alt.Scale(type="log", base=2, domain=[low / 1.3, high * 1.3], nice=False)
        ticks = [2.0**power for power in range(40) if low / 1.3 <= 2.0**power <= high * 1.3]
        labels = alt.Axis(format=",d", labelOverlap="greedy", **_at(ticks))
    else:
        scale = alt.Scale(domain=[0, high * 1.08], nice=False)
        labels = alt.Axis(format=",d", tickMinStep=1, labelOverlap="greedy")
    return channel(f"{field}:Q", title=title, scale=scale, axis=labels)


def _at(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at these values and no others; Vega thins them out unless it is told how many they are."""
    return {"values": list(values), "tickCount": len(values)}


def _number_format(largest: float) -> str:
    """Figures of an axis without exponents: `1,500`, `0.25`, and `1.05M` where thousands are not enough."""
    return ".3~s" if largest >= 100_000 else ",~r"


def padded(low: float, high: float, share: float) -> list[float]:
    """A domain with air on both sides, also around a single value."""
    air = (high - low) * share or abs(high) * 0.05 or 0.5
    return [low - air, high + air]


def amount_axis(field: str, figures: Sequence[float]) -> Any:
    """Amounts on the vertical axis, from zero."""
    labels = alt.Axis(format=_number_format(max(figures, default=0)))
    return alt.Y(f"{field}:Q", title=None, scale=alt.Scale(zero=True, nice=True), axis=labels)


def colours(lines: Sequence[Line], field: str = "line", *, channel: Any = alt.Color) -> Any:
    """Lines by colour, without a legend of the chart's own."""
    scale = alt.Scale(domain=[line.label for line in lines], range=[line.colour for line in lines])
    return channel(f"{field}:N", scale=scale, legend=None)


def shapes(lines: Sequence[Line], field: str = "line") -> Any:
    """Lines by symbol."""
    labels = [line.label for line in lines]
    return alt.Shape(f"{field}:N", scale=alt.Scale(domain=labels, range=[line.shape for line in lines]), legend=None)


def dashes(lines: Sequence[Line], field: str = "line") -> Any:
    """Lines by dash."""
    scale = alt.Scale(domain=[line.label for line in lines], range=[list(line.dash or (1, 0)) for line in lines])
    return alt.StrokeDash(f"{field}:N", scale=scale, legend=None)


def tips(fields: Mapping[str, str]) -> list[Any]:
    """What hovering shows: a field that holds text already, and its name."""
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in fields.items()]


def ring(rows: Sequence[Row], *, colour: str = ACCENT, meaning: str = "recommended", size: int = 240) -> Any:
    """A ring around points: the one to take, or the one that was taken."""
    mark = {"shape": "circle", "size": size, "filled": False, "stroke": colour, "strokeWidth": 2.25, "opacity": 1.0}
    return chart_of(rows).mark_point(**mark, description=meaning)


def crosses(rows: Sequence[Row], x: Any, y: Any, fields: Mapping[str, str]) -> Any:
    """What failed or did not fit: a cross, never colour alone."""
    mark = {"shape": CROSS, "size": 90, "stroke": BAD, "strokeWidth": 2.5, "opacity": 1.0}
    return chart_of(rows).mark_point(**mark).encode(x=x, y=y, tooltip=tips(fields))
