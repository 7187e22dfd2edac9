"""A chart as data: its marks, its two axes, its series, and what is to be seen in it, in words.

Rows are plain mappings: `x`, `y`, `line` (which series), `label` and `shown` (how the place and the figure are
written), and where they apply `low`, `high`, `chosen`, `hollow`, and `at` (the place without its line). `drawing.py`
turns a chart into Vega-Lite; nothing here knows how.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from brim.reporting.theme import (
    ACCENT,
    BAD,
    HEIGHT,
    INK,
    LIMIT,
    MUTED,
    SURFACE,
    LegendKey,
    Series,
    series_colour,
)
from brim.units import course

__all__ = [
    "Axis", "Chart", "Marks", "Row", "bar_chart", "category_chart", "crosses", "front_chart", "interval_ends",
    "limit_line", "line_chart", "rings", "time_chart", "time_unit",
]  # fmt: skip

Row = Mapping[str, Any]
# from zero; near the figures, by multiples where they span many; a score within 0 and 1; batch sizes; words; epochs;
# from zero to the last; a knob at its own values; a percentage
Scale = Literal["zero", "near", "score", "sizes", "words", "whole", "span", "knob", "log knob", "percent"]

CHOSEN_KEY = LegendKey("recommended", ACCENT, "ring")
MOST_POINTS = 60  # of a line: more are not distinguished
MOST_NAMED = 3  # series or rows that a caption names; of more, the highest and the lowest
_MOST_KEYS = 14  # series that a legend names; of more, the first and the last
_MOST_NAMES, _LONGEST_NAME = 16, 3  # points of a front that are named, characters of a name
_ROOMY = 16  # so many rings stand beside each other on a phone
_MOST_STRETCHES, _LONGEST_STRETCH, _NARROWEST = 24, 4, 0.05
# What lies on what in a chart of lines, from the back.
_LAYERS = (
    "rule", "interval", "faint", "line", "ring", "small ring", "hover", "point", "hollow", "cross",
    "cross at the bottom",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: its title, its scale, and its values where they are known beforehand."""

    title: str = ""
    scale: Scale = "near"
    values: tuple[Any, ...] = ()  # words in their order, or the only ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """Rows drawn in one way; without a colour of their own, in that of their series."""

    mark: str  # see drawing.py
    rows: Sequence[Row]
    colour: str = ""
    hover: Mapping[str, str] = dataclasses.field(default_factory=dict)  # field and what it is called
    look: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further properties of the mark
    key: LegendKey | None = None  # its entry in the legend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn, and what it shows for those who cannot see it; marks without rows are left out."""

    title: str
    caption: str
    x: Axis
    y: Axis
    marks: Sequence[Marks]
    series: Sequence[Series] = ()
    keys: Sequence[LegendKey] = ()
    height: int = HEIGHT

    def __post_init__(self) -> None:
        assert self.caption.strip(), f"the chart {self.title} says nothing to those who cannot see it"
        object.__setattr__(self, "marks", tuple(one for one in self.marks if one.rows))


def interval_ends(value: float | None, half: float | None) -> dict[str, float]:
    """The ends of an interval; that of a score ends where scores do."""
    if value is None or half is None:
        return {}
    low, high = value - half, value + half
    return {"low": max(low, 0.0), "high": min(high, 1.0)} if 0 <= value <= 1 else {"low": low, "high": high}


def limit_line(at: float | None, label: str = "memory limit") -> Marks:
    """A dashed line across the chart; without a label it has no entry in the legend."""
    key = LegendKey(label, LIMIT, "dashed") if label else None
    return Marks(mark="rule", rows=[] if at is None else [{"y": at}], colour=LIMIT, key=key)


def rings(rows: Sequence[Row], key: LegendKey = CHOSEN_KEY) -> Marks:
    """Rings around the points of these rows."""
    known = [row for row in rows if row["y"] is not None]
    return Marks(mark="ring" if len(known) <= _ROOMY else "small ring", rows=known, colour=key.colour, key=key)


def crosses(rows: Sequence[Row], label: str = "failed") -> tuple[Marks, Marks]:
    """What did not work, each with its `reason`; rows without a `y` are at the bottom."""
    key = LegendKey(label, BAD, "cross")
    placed, others = ([row for row in rows if (row.get("y") is None) == without] for without in (False, True))
    return Marks(mark="cross", rows=placed, key=key), Marks(mark="cross at the bottom", rows=others, key=key)


def _legend(series: Sequence[Series], marks: Sequence[Marks] = ()) -> list[LegendKey]:
    """The series, of very many the two ends, and what is marked beside them."""
    keys = [one.key() for one in series]
    if len(keys) > _MOST_KEYS:
        keys = [keys[0], LegendKey("to", MUTED, "none"), keys[-1]]
    return [*keys, *dict.fromkeys(one.key for one in marks if one.rows and one.key)]


def line_chart(
    title: str, rows: Sequence[Row], *, x: Axis, y: Axis, series: Sequence[Series] = (), marked: Sequence[Marks] = (),
    caption: str = "", note: str = "",
) -> Chart | None:  # fmt: skip
    """Lines with their points; None where no figure is known.

    `marked` is what is drawn beside them: a limit, rings, crosses, faint lines. Without a `caption` it is where each
    line begins and ends; `note` follows it. A series that is `bare`, or has more rows than can be distinguished, is a
    line whose points only answer the mouse.
    """
    known = [row for row in rows if row["y"] is not None]
    if not known:
        return None
    series = series or [Series(label=known[0]["line"], colour=series_colour(0))]
    counts = {one.label: sum(row["line"] == one.label for row in known) for one in series}
    crowded = {one.label for one in series if one.joined and counts[one.label] > MOST_POINTS}
    level = {one.label for one in series if one.bare and one.dash and counts[one.label] == 1}  # a limit at one place
    bare = crowded | level | {one.label for one in series if one.bare and counts[one.label] != 1}
    # Words have no order that a line could follow.
    joined = bare | {one.label for one in series if one.joined and x.scale != "words"}
    pointed = [row for row in known if row["line"] not in bare]
    hover = {"label": x.title or "value", "line": "line", "shown": y.title or title}
    if len(series) == 1:
        del hover["line"]
    crossed = {"label": x.title or "value", "reason": "what happened"}
    hovers = {"ring": hover, "small ring": hover, "cross": crossed, "cross at the bottom": crossed}
    stepped = {"interpolate": "step-after"} if any(one.stepped for one in series) else {}
    marks = [
        *(dataclasses.replace(one, hover=hovers.get(one.mark, {})) for one in marked),
        Marks(mark="rule", rows=[{"y": row["y"]} for row in known if row["line"] in level], colour=LIMIT),
        Marks(mark="interval", rows=[row for row in known if row.get("low") is not None]),
        Marks(mark="line", rows=[row for row in known if row["line"] in joined], look=stepped),
        Marks(mark="hover", rows=[row for row in known if row["line"] in bare], hover=hover),
        Marks(mark="point", rows=[row for row in pointed if not row.get("hollow")], hover=hover),
        Marks(mark="hollow", rows=[row for row in pointed if row.get("hollow")], hover=hover),
    ]
    drawn = [dataclasses.replace(one, bare=one.label in bare) for one in series if counts[one.label]]
    alone = len(drawn) == 1 and not drawn[0].named and not any(one.mark == "rule" and one.rows for one in marked)
    said = caption or _lines_caption(title, known, [one.label for one in drawn])
    return Chart(
        title=title, caption=f"{said} {note}".strip(), x=x, y=y, series=series,
        marks=sorted(marks, key=lambda one: _LAYERS.index(one.mark)), keys=_legend([] if alone else drawn, marked),
    )  # fmt: skip


def _lines_caption(title: str, rows: Sequence[Row], drawn: Sequence[str]) -> str:
    """Where each line begins and ends; of many lines, the highest and the lowest point."""
    if len(drawn) > MOST_NAMED:
        return f"{title}: {_extremes(rows, 'y', _place_of)}."
    courses = {
        label: course([(row.get("at", row["label"]), row["y"], row["shown"]) for row in rows if row["line"] == label])
        for label in drawn
    }
    said = "; ".join(f"{label} {words}" if len(drawn) > 1 else words for label, words in courses.items())
    return f"{title}: {said}."


def _place_of(row: Row) -> str:
    """A point's line and place; a label may name both."""
    return row["label"] if row["line"] in row["label"] else f"{row['line']}, {row['label']}"


def _extremes(rows: Sequence[Row], field: str, name: Any) -> str:
    top, bottom = (pick(rows, key=lambda row: row[field]) for pick in (max, min))
    return f"highest {top['shown']} ({name(top)}), lowest {bottom['shown']} ({name(bottom)})"


def category_chart(
    title: str, rows: Sequence[Row], *, x: Axis, what: str, of: str = "run", series: Sequence[Series] = (),
    strokes: Sequence[Row] = (), rule: float | None = None,
) -> Chart | None:  # fmt: skip
    """Names down the side, each with its figure `x` and perhaps an interval; `strokes` behind it are single seeds."""
    if not rows:
        return None
    series = series or [Series(label=rows[0]["line"], colour=series_colour(0))]
    names = tuple(dict.fromkeys(row["name"] for row in rows))
    hover = {"name": what, **({"line": of} if len(series) > 1 else {}), "shown": x.title}
    figures = [row[field] for row in [*rows, *strokes] for field in ("x", "low", "high") if row.get(field) is not None]
    near = rule is not None and (rule == 0 or min(figures) <= rule <= max(figures))
    thick = {"strokeWidth": 2, "opacity": 1}
    marks = [
        Marks(mark="rule", rows=[{"x": rule}] if near else [], colour=MUTED, look={"strokeDash": [4, 3]}),
        Marks(mark="stroke", rows=strokes, hover={**hover, "seed": "seed"}),
        Marks(mark="interval", rows=[row for row in rows if row.get("low") is not None], look=thick),
        Marks(mark="point", rows=rows, hover=hover, look={"size": 64}),
    ]

    def named(row: Row) -> str:
        return f"{row['name']}, {row['line']}" if len(series) > 1 else row["name"]

    if len(rows) <= MOST_NAMED:
        said = "; ".join(f"{named(row)} {row['shown']}" for row in rows)
    else:
        said = _extremes(rows, "x", named)
    seeds = len({row["seed"] for row in strokes})
    note = f" Over {seeds} seeds; a stroke is a seed." if seeds else ""
    return Chart(
        title=title, caption=f"{x.title[:1].upper()}{x.title[1:]} by {what}: {said}.{note}", x=x,
        y=Axis(what, "words", names), series=series, marks=marks,
        keys=_legend(series) if len(series) > 1 or series[0].named else (),
        height=max(round(len(names) * (34 if len(series) == 1 else 25 * len(series))), 76),
    )  # fmt: skip


def bar_chart(
    title: str, rows: Sequence[Row], *, x: Axis, figure: str, caption: str, series: Sequence[Series] = (),
    marked: Sequence[Marks] = (),
) -> Chart | None:  # fmt: skip
    """Bars from zero: rows with `x` and `y`, of several series stacked; rows with `low` and `high` are bins.

    `marked` is drawn over them: a limit, or a tick above each bar.
    """
    if not rows:
        return None
    placed = [row for group in (rows, *(one.rows for one in marked)) for row in group if "x" in row]
    names = tuple(dict.fromkeys(row["x"] for row in placed))
    binned = "low" in rows[0]
    narrow = {"size": 56} if len(names) <= 3 and not binned else {}  # px: three bars need not fill the page
    hover = {"label": x.title, **({"line": "part"} if len(series) > 1 else {}), "shown": figure}
    marks = [
        Marks(mark="bin" if binned else "bar", rows=rows, hover=hover, look=narrow),
        *(dataclasses.replace(one, look=narrow if one.mark == "tick" else {}) for one in marked),
    ]
    others = _legend([], marked)
    bars = [LegendKey(one.label, one.colour, "bar") for one in series] if len(series) > 1 or others else []
    return Chart(
        title=title, caption=caption, x=x if binned else Axis(x.title, "words", names), y=Axis(figure, "zero"),
        series=series or [Series(label="", colour=series_colour(0))], marks=marks, keys=[*bars, *others],
    )  # fmt: skip


def front_chart(
    title: str, rows: Sequence[Row], *, x: Axis, figure: str, what: str, caption: str, series: Sequence[Series] = ()
) -> Chart | None:
    """A score against a cost: rows with `x`, `y`, `front`, `short`; a front for each series that nothing beats.

    Of one series the points off the front are hollow, those on it are named, and the chosen one stands out.
    """
    if not rows:
        return None
    hover = {"label": what, "shown": figure, "cost_shown": x.title}
    front = [row for row in rows if row["front"]]
    if series:
        marks = [
            Marks(mark="front", rows=front),
            Marks(mark="point", rows=rows, hover={"line": "run", **hover}),
        ]
        keys = [one.key() for one in series]
    else:
        series = [Series(label=rows[0]["line"], colour=series_colour(0))]
        hover = {**hover, "roles": "role"}
        chosen = [{**row, "name": f"recommended: {row['short']}"} for row in rows if row["chosen"]]
        others = [row for row in front if not row["chosen"]]
        named = len(others) <= _MOST_NAMES and all(len(row["short"]) <= _LONGEST_NAME for row in others)
        marks = [
            Marks(mark="interval", rows=[row for row in rows if row["low"] is not None], colour=MUTED),
            Marks(mark="front", rows=front if len(front) > 1 else []),
            Marks(mark="hollow", rows=[row for row in rows if not row["front"] and not row["chosen"]], hover=hover,
                  colour=MUTED),
            Marks(mark="point", rows=others, hover=hover),
            Marks(mark="name", rows=[{**row, "name": row["short"]} for row in others] if named else []),
            Marks(mark="diamond", rows=chosen, colour=ACCENT, hover=hover),
            *_chosen_name(chosen, [row["x"] for row in rows]),
        ]  # fmt: skip
        keys = [
            LegendKey("on the front", series_colour(0)), LegendKey("beaten by another", MUTED, filled=False),
            *([LegendKey("recommended", ACCENT, "diamond")] if chosen else []),
        ]  # fmt: skip
    return Chart(
        title=title, caption=caption, x=x, y=Axis(figure, "score"), series=series, height=300, keys=keys, marks=marks,
    )  # fmt: skip


def _chosen_name(chosen: Sequence[Row], costs: Sequence[float]) -> list[Marks]:
    """The name of the point to take, on the side where there is room, with a halo that sets it off from the lines."""
    right = bool(chosen) and chosen[0]["x"] > (min(costs) + max(costs)) / 2
    look = {"align": "right" if right else "left", "dx": 4 if right else -4, "dy": -24, "fontWeight": "bold"}
    halo = {"stroke": SURFACE, "strokeWidth": 4, "strokeJoin": "round"}
    return [
        Marks(mark="name", rows=chosen, look={**look, **halo, "limit": 260}),
        Marks(mark="name", rows=chosen, colour=INK, look={**look, "limit": 260}),
    ]


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis so long, and its seconds."""
    if seconds < 180:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def time_chart(
    title: str, rows: Sequence[Row], *, y: Axis, stretches: Sequence[tuple[str, float, float]], caption: str,
    limit: Marks,
) -> Chart:  # fmt: skip
    """A figure over time: rows with `seconds` and `y`; `stretches` are who ran from when to when."""
    end = max(row["seconds"] for row in rows) or 1.0
    unit, size = time_unit(end)
    drawn = [{**row, "x": row["seconds"] / size} for row in rows]
    several = 1 < len(stretches) <= _MOST_STRETCHES
    names = [
        {"x": (start + stop) / 2 / size, "name": label}
        for label, start, stop in stretches
        if several and len(label) <= _LONGEST_STRETCH and (stop - start) / end >= _NARROWEST
    ]
    edges = [{"x": start / size} for _, start, _ in stretches[1:]] if several else []
    hover = {**({"label": "value"} if len(stretches) > 1 else {}), "shown": "figure"}
    marks = [
        Marks(mark="edge", rows=edges, colour=MUTED),
        Marks(mark="name on top", rows=names),
        Marks(mark="area", rows=drawn, colour=series_colour(0)),
        Marks(mark="line", rows=drawn, colour=series_colour(0), hover=hover, look={"strokeWidth": 1.5}),
        limit,
    ]
    return Chart(
        title=title, caption=caption, x=Axis(f"time ({unit})", "span"), y=y, height=HEIGHT - 60, marks=marks,
        keys=_legend([], marks),
    )  # fmt: skip
