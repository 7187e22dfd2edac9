"""A chart as a Vega-Lite specification: the only file that knows Altair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

from brim.reporting.charts import Axis, Chart, Marks
from brim.reporting.theme import BAD, CROSS, MUTED, SURFACE, Series

__all__ = ["Spec", "draw", "vega_lite_version"]

Spec = dict[str, Any]  # a Vega-Lite specification

_MOST_TICKS = 16  # so many values are each worth a tick
_MOST_LABELS, _MOST_LETTERS = 24, 50  # words beside each other that are not turned, and how long they are together
_LOG_FROM = 30.0  # the highest over the lowest, from where on figures are drawn by multiples
_RING = {"shape": "circle", "filled": False, "strokeWidth": 2.25, "opacity": 1}
# How a mark looks: Vega's mark, and its properties.
_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "line": ("line", {}),
    "faint": ("line", {"strokeWidth": 1, "opacity": 0.35}),
    "front": ("line", {"interpolate": "step-after", "strokeDash": [4, 3]}),
    "area": ("area", {"fillOpacity": 0.18, "line": False}),
    "point": ("point", {"size": 48, "opacity": 1, "filled": True}),
    "hollow": ("point", {"size": 48, "opacity": 1, "filled": True, "fill": SURFACE}),
    "hover": ("point", {"size": 70, "opacity": 0, "filled": True}),
    "ring": ("point", {**_RING, "size": 240}),
    "small ring": ("point", {**_RING, "size": 100}),
    "diamond": ("point", {"shape": "diamond", "size": 200, "filled": True, "stroke": SURFACE, "opacity": 1}),
    "cross": ("point", {"shape": CROSS, "size": 90, "stroke": BAD, "strokeWidth": 2.5, "opacity": 1}),
    "cross at the bottom": ("point", {"shape": CROSS, "size": 90, "stroke": BAD, "strokeWidth": 2.5, "opacity": 1}),
    "interval": ("rule", {"opacity": 0.55}),
    "rule": ("rule", {"strokeDash": [6, 4]}),
    "edge": ("rule", {"opacity": 0.45, "strokeDash": [2, 3], "strokeWidth": 1}),
    "bar": ("bar", {"stroke": SURFACE, "strokeWidth": 1}),
    "bin": ("bar", {"stroke": SURFACE, "strokeWidth": 1}),
    "tick": ("tick", {"thickness": 2.5}),
    "stroke": ("tick", {"thickness": 1.5, "size": 13, "opacity": 0.55, "orient": "vertical"}),
    "name": ("text", {"dy": -9, "fill": MUTED}),
    "name on top": ("text", {"dy": -8, "fill": MUTED, "baseline": "bottom"}),
}


def vega_lite_version() -> str:
    """The Vega-Lite that the specifications are written for, such as `v6.4.1`."""
    return alt.SCHEMA_VERSION


def draw(chart: Chart) -> Spec:
    """The specification of a chart, as wide as the place it stands in."""
    layers = [_layer(chart, marks) for marks in chart.marks]
    spec: Spec = alt.layer(*layers).properties(width="container", height=chart.height).to_dict()
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
    """The fields that a layer draws or shows; a page need not carry the others."""
    channels = [one for channel in encoding.values() for one in (channel if isinstance(channel, list) else [channel])]
    return {channel["field"] for channel in channels if "field" in channel}


def _layer(chart: Chart, marks: Marks) -> Any:
    kind, look = _LOOKS[marks.mark]
    look = {**look, **marks.look}
    if marks.colour:
        filled = kind in ("bar", "area", "text", "tick") or (look.get("filled") and "fill" not in look)
        look["fill" if filled else "stroke"] = marks.colour
    rows = [dict(row) for row in marks.rows]
    if marks.mark == "name":
        rows = [{**row, "y": row["y"] if row.get("high") is None else row["high"]} for row in rows]
    layer: Any = getattr(alt.Chart(alt.InlineData(values=rows)), f"mark_{kind}")(**look)
    return layer.encode(**_places(chart, marks), **_styles(chart, marks, kind))


def _places(chart: Chart, marks: Marks) -> dict[str, Any]:
    """Where the marks lie."""
    x, y = _channel(alt.X, chart, "x"), _channel(alt.Y, chart, "y")
    across = chart.y.scale == "words"
    if marks.mark in ("rule", "edge"):
        return {"x": x} if "x" in marks.rows[0] else {"y": y}
    if marks.mark == "interval" and across:
        return {"x": alt.X("low:Q", title=chart.x.title), "x2": "high:Q", "y": y}
    if marks.mark == "interval":
        return {"x": x, "y": alt.Y("low:Q", title=None), "y2": "high:Q"}
    if marks.mark == "cross at the bottom":
        return {"x": x, "y": alt.value(chart.height - 7)}
    if marks.mark == "name on top":
        return {"x": x, "y": alt.value(0)}
    if marks.mark == "bin":
        return {"x": alt.X("low:Q", bin="binned", title=chart.x.title, axis=alt.Axis(format=",~r")), "x2": "high:Q",
                "y": y}  # fmt: skip
    return {"x": x, "y": y}


def _styles(chart: Chart, marks: Marks, kind: str) -> dict[str, Any]:
    """Colour, symbol and dash by series, the place beside the others, and what hovering shows."""
    found: dict[str, Any] = {}
    series = chart.series
    if marks.hover:
        found["tooltip"] = [alt.Tooltip(f"{field}:N", title=title) for field, title in marks.hover.items()]
    if chart.y.scale == "words" and len(series) > 1 and marks.mark != "rule":
        found["yOffset"] = alt.YOffset("line:N", sort=[one.label for one in series])
    if kind == "text":
        found["text"] = "name:N"
    if marks.mark == "bar" and len(series) > 1:
        found["order"] = "place:Q"
    if marks.colour or kind == "text" or marks.mark.startswith("cross"):
        return found
    channel = alt.Stroke if marks.mark == "hollow" else alt.Color
    found["stroke" if marks.mark == "hollow" else "color"] = _by_series(channel, series, lambda one: one.colour)
    if marks.mark in ("point", "hollow", "hover"):
        found["shape"] = _by_series(alt.Shape, series, lambda one: one.shape)
    if marks.mark == "line":
        found["strokeDash"] = _by_series(alt.StrokeDash, series, lambda one: list(one.dash or (1, 0)))
    if marks.mark == "faint":
        found["detail"] = "run:N"
    return found


def _by_series(channel: Any, series: Sequence[Series], look: Callable[[Series], Any]) -> Any:
    scale = alt.Scale(domain=[one.label for one in series], range=[look(one) for one in series])
    return channel("line:N", scale=scale, legend=None)


def _channel(channel: Any, chart: Chart, side: str) -> Any:
    """An axis with its scale, wide enough for all that is drawn."""
    axis: Axis = getattr(chart, side)
    vertical = side == "y"
    if axis.scale == "words":
        return _words(channel, axis, vertical=vertical)
    ends = (side, "low", "high") if vertical == (chart.y.scale != "words") else (side,)
    figures = [
        value for marks in chart.marks for row in marks.rows for name in ends
        if isinstance(value := row.get(name), int | float)
    ]  # fmt: skip
    options = _scale(axis, [*figures, *(axis.values if "knob" in axis.scale else ())])
    labels = {"format": _number_format(max(figures, default=0.0)), "labelOverlap": "greedy", **options.pop("axis", {})}
    title = None if vertical else axis.title
    if chart.y.scale == "words":
        labels |= {"grid": True, "format": "~r", "labelOverlap": "parity"}
    if chart.height == 300 and vertical:  # a front: room for the name of the point to take
        low, high = options["domain"]
        options |= {"domain": [low, high + (high - low) * 0.12], "nice": False}
    name = {"x": "x:Q", "y": "y:Q"}[side]
    return channel(name, title=title, scale=alt.Scale(**options), axis=alt.Axis(**labels))


def _words(channel: Any, axis: Axis, *, vertical: bool) -> Any:
    if vertical:
        return channel("name:N", sort=list(axis.values), title=None, axis=alt.Axis(grid=False, labelLimit=140))
    longest = max((len(str(value)) for value in axis.values), default=0)
    crowded = longest > 6 and len(axis.values) * (longest + 2) > _MOST_LETTERS
    turned = crowded or len(axis.values) > _MOST_LABELS
    labels = alt.Axis(labelAngle=-38 if turned else 0, labelLimit=150, labelOverlap="greedy")
    return channel("x:O", sort=list(axis.values), title=axis.title, axis=labels)


def _scale(axis: Axis, figures: Sequence[float]) -> dict[str, Any]:
    """The properties of a scale; under `axis` those of its labels."""
    low, high = min(figures, default=0.0), max(figures, default=1.0)
    ticks = {"axis": _at(axis.values)} if 0 < len(axis.values) <= _MOST_TICKS else {}
    if axis.scale == "zero":
        return {"zero": True, "nice": True}
    if axis.scale == "percent":
        return {"domain": [0, 1], "nice": False, "axis": {"format": ".0%"}}
    if axis.scale == "span":
        return {"domain": [0.0, 1.012 * high or 1.0], "nice": False}  # a symbol at the end stays whole
    if axis.scale == "whole":
        return {"domain": _padded(low, high, 0.04), "nice": False, "zero": False, "axis": {"tickMinStep": 1}}
    if axis.scale == "knob":
        return {"domain": _padded(low, high, 0.04), "nice": False, "zero": False, **ticks}
    if axis.scale == "log knob":
        return {"type": "log", "domain": [low / 1.12, high * 1.12], "nice": False, **ticks}
    if axis.scale == "sizes":
        return _sizes(low, high)
    if axis.scale == "near" and low > 0 and high / low >= _LOG_FROM:
        labels = {"format": "~g", "values": _multiples(low, high)}
        return {"type": "log", "domain": [low / 1.15, high * 1.15], "nice": False, "axis": labels}
    domain = _padded(low, high, 0.08)
    if axis.scale == "score" and low >= 0 and high <= 1:  # a score has nothing below 0 and nothing above 1
        domain = [max(domain[0], 0.0), min(domain[1], 1.0)]
    return {"domain": domain, "nice": axis.scale != "score", "zero": False, "axis": {"format": "~g"}}


def _sizes(low: float, high: float) -> dict[str, Any]:
    """Batch sizes: in doublings where they span several, else evenly."""
    if low > 0 and high / low >= 8:
        ticks = [2.0**power for power in range(40) if low / 1.3 <= 2.0**power <= high * 1.3]
        domain = [low / 1.3, high * 1.3]
        return {"type": "log", "base": 2, "domain": domain, "nice": False, "axis": {"format": ",d", **_at(ticks)}}
    return {"domain": [0, high * 1.08], "nice": False, "axis": {"format": ",d", "tickMinStep": 1}}


def _at(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at these values and no others; Vega thins them out unless it is given their number."""
    return {"values": list(values), "tickCount": len(values)}


def _number_format(largest: float) -> str:
    """Figures of an axis without exponents: `1,500`, `0.25`, and `1.05M` where thousands are not enough."""
    return ".3~s" if largest >= 100_000 else ",~r"


def _padded(low: float, high: float, share: float) -> list[float]:
    """A domain with air on both sides, also around a single value."""
    air = (high - low) * share or abs(high) * 0.05 or 0.5
    return [low - air, high + air]


def _multiples(low: float, high: float) -> list[float]:
    """Powers of ten between two figures, not more than half a dozen; where there are few, their doubles and fives."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 3 else (1,)
    found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    return found[:: math.ceil(len(found) / 6) or 1]
