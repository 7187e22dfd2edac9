"""How charts look: colours by name, so that the style sheet alone decides what they are in light, dark and print.

Every colour is a CSS variable of `template/page.css`; a chart drawn once follows a change of theme by itself. What
tells lines apart is never colour alone: each has its own symbol and dash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from brim.reporting.base import Key

__all__ = [
    "ACCENT", "BAD", "CONFIG", "CROSS", "HEIGHT", "INK", "LIMIT", "MUTED", "RAMP_STEPS", "SURFACE", "Line", "lines_for",
    "ramp_for", "series_colour",
]  # fmt: skip

HEIGHT = 240  # px, of the plot itself
INK, MUTED, SURFACE = "var(--ink)", "var(--muted)", "var(--surface)"
ACCENT, BAD, LIMIT = "var(--accent)", "var(--bad)", "var(--limit)"
CROSS = "M-0.7,-0.7L0.7,0.7M0.7,-0.7L-0.7,0.7"  # what did not fit, or failed
RAMP_STEPS = 12  # --ramp-1 … --ramp-12 in the style sheet

_SERIES = 6
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """How one line of a chart is told from the others."""

    label: str
    colour: str
    shape: str = "circle"
    dash: tuple[int, ...] = ()
    bare: bool = False  # a limit or a ceiling: a line without points

    def key(self) -> Key:
        """Its entry in the legend."""
        return Key(label=self.label, colour=self.colour, mark="dashed" if self.bare else self.shape)


def series_colour(place: int) -> str:
    """The colour of the place-th series, from 0."""
    return f"var(--series-{place % _SERIES + 1})"


def lines_for(labels: Sequence[str]) -> list[Line]:
    """A style for each label; of more labels than there are hues, an ordered ramp."""
    if len(labels) > _SERIES:
        return ramp_for(labels)
    return [
        Line(label=label, colour=series_colour(place), shape=_SHAPES[place], dash=_DASHES[place])
        for place, label in enumerate(labels)
    ]


def ramp_for(labels: Sequence[str]) -> list[Line]:
    """A style for each label of an order: from the ramp's one end to the other, with symbols in turn."""
    last = max(len(labels) - 1, 1)
    return [
        Line(
            label=label,
            colour=f"var(--ramp-{1 + round(place * (RAMP_STEPS - 1) / last)})",
            shape=_SHAPES[place % len(_SHAPES)],
        )
        for place, label in enumerate(labels)
    ]
