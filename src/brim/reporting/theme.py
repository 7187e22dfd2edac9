"""How charts look: colours by name, so that the style sheet alone decides what they are in light, dark and print.

Every colour is a CSS variable of `template/page.css`; a chart drawn once follows a change of theme by itself. What
tells lines apart is never colour alone: each has its own symbol and dash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ACCENT", "BAD", "CONFIG", "CROSS", "HEIGHT", "INK", "LIMIT", "MUTED", "RAMP_STEPS", "SURFACE", "LegendKey",
    "Series", "ramp_for", "series_colour", "series_for",
]  # fmt: skip

HEIGHT = 240  # px, of the plot itself
INK, MUTED, SURFACE = "var(--ink)", "var(--muted)", "var(--surface)"
ACCENT, BAD, LIMIT = "var(--accent)", "var(--bad)", "var(--limit)"
CROSS = "M-0.7,-0.7L0.7,0.7M0.7,-0.7L-0.7,0.7"  # what did not fit, or failed
RAMP_STEPS = 12  # --ramp-1 … --ramp-12 in the style sheet

_NUM_SERIES = 6
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right")
_DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 3), (9, 3, 2, 3), (4, 2), (12, 3))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

CONFIG: dict[str, Any] = {
    "aria": False,  # the page gives each chart one text and a table; hundreds of labelled marks would bury them
    "background": "transparent",
    "font": _FONT,
    "padding": 4,
    "view": {"stroke": None, "continuousHeight": HEIGHT, "discreteHeight": HEIGHT},
    "axis": {
        "labelColor": MUTED, "titleColor": MUTED, "domainColor": "var(--rule)", "tickColor": "var(--rule)",
        "gridColor": "var(--grid)", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
        "titlePadding": 8, "tickSize": 4, "labelPadding": 4, "labelSeparation": 6,
    },
    "axisY": {"tickCount": 5, "domain": False, "ticks": False},
    "axisX": {"grid": False, "tickCount": 6},
    "text": {"fontSize": 12, "fill": INK},
    "line": {"strokeWidth": 2, "strokeCap": "round"},
    "point": {"strokeWidth": 1.5},
    "rule": {"strokeWidth": 1.5},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LegendKey:
    """One entry of a legend; the page draws it, not the chart, so that it wraps on a phone."""

    label: str
    colour: str  # a CSS colour
    mark: str = "circle"  # a Vega symbol, `line`, `dashed`, `bar`, `ring`, `cross` or `none`
    filled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """How one line of a chart, or one group of its points, is distinguished from the others."""

    label: str
    colour: str
    shape: str = "circle"
    dash: tuple[int, ...] = ()
    bare: bool = False  # a line without points: a limit, a ceiling, a dense curve
    joined: bool = True  # whether a line joins its points
    stepped: bool = False  # whether a figure holds until the next one
    named: bool = False  # in the legend also where it is the only one

    def key(self) -> LegendKey:
        """Its entry in the legend."""
        stroke = "dashed" if self.dash else "line"
        return LegendKey(self.label, self.colour, stroke if self.bare else self.shape)


def series_colour(place: int) -> str:
    """The colour of the place-th series, from 0."""
    return f"var(--series-{place % _NUM_SERIES + 1})"


def series_for(labels: Sequence[str]) -> list[Series]:
    """A style for each label; of more labels than there are hues, an ordered ramp."""
    if len(labels) > _NUM_SERIES:
        return ramp_for(labels)
    return [
        Series(label=label, colour=series_colour(place), shape=_SHAPES[place], dash=_DASHES[place])
        for place, label in enumerate(labels)
    ]


def ramp_for(labels: Sequence[str]) -> list[Series]:
    """A style for each label of an order: from one end of the ramp to the other, with symbols in turn."""
    last = max(len(labels) - 1, 1)
    steps = [1 + round(place * (RAMP_STEPS - 1) / last) for place in range(len(labels))]
    return [
        Series(label=label, colour=f"var(--ramp-{step})", shape=_SHAPES[place % len(_SHAPES)])
        for place, (label, step) in enumerate(zip(labels, steps, strict=True))
    ]
