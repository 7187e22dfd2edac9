"""The points of a profile, or of several over the same knobs, and the axis they lie on, whatever knobs there are.

One numeric knob is the axis. Of several, the one with the most values is, and the others tell the lines apart. A knob
without numbers (`dtype`) becomes an axis of words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.reporting.charts import Axis
from brim.reporting.units import number, significant, text

__all__ = ["SEPARATOR", "KnobPoint", "make_points"]

SEPARATOR = "\u00a0·\u00a0"  # between the values of several knobs; a line does not break there
LOG_FROM = 16.0  # the largest value over the smallest, from where on steps are multiples and not differences

Entry = Mapping[str, Any]  # of a profile's summary


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnobPoint:
    """One setting of the knobs, with its place and what each run measured there."""

    index: int  # in the summary
    label: str  # max_crops=4, max_new_tokens=8
    short: str  # the values alone: 4, or 4 · 8, or 1,572,864
    x: float | str
    line: str  # the other knobs: max_new_tokens=8; empty where there is one knob
    entries: tuple[Entry | None, ...]  # of each run; None where it has no such point

    @property
    def entry(self) -> Entry:
        """What the first run measured."""
        return self.entries[0] or {}

    @property
    def done(self) -> bool:
        """Whether the first run's ran to its end."""
        return bool(self.entry.get("state", "done") == "done")

    def figure(self, field: str, run: int = 0) -> float | None:
        """A number of an entry, None where it has none."""
        return number((self.entries[run] or {}).get(field))

    def place(self) -> dict[str, Any]:
        """The fields that every row of this point has."""
        label = self.label if self.line else self.short
        return {"index": self.index, "label": label, "short": self.short, "x": self.x, "line": self.line}


def make_points(
    knobs: Sequence[str], entries: Sequence[Entry], runs: Sequence[Sequence[Entry | None]] | None = None
) -> tuple[Axis, list[KnobPoint]]:
    """The axis, and every entry's point on it in the document's order; `runs` has what each run measured there."""
    axis_knob = _axis_knob(knobs, entries)
    others = [knob for knob in knobs if knob != axis_knob]
    points = []
    for index, entry in enumerate(entries):
        label = ", ".join(f"{knob}={_value_text(entry.get(knob))}" for knob in knobs)
        short = SEPARATOR.join(_short_text(entry.get(knob)) for knob in knobs)
        figure = None if axis_knob is None else _numeric(entry.get(axis_knob))
        line = "" if axis_knob is None else ", ".join(f"{knob}={_value_text(entry.get(knob))}" for knob in others)
        measured = (entry,) if runs is None else tuple(runs[index])
        x = short if figure is None else figure
        points.append(KnobPoint(index=index, label=label, short=short, x=x, line=line, entries=measured))
    return _axis(axis_knob, SEPARATOR.join(knobs), points), points


def _axis_knob(knobs: Sequence[str], entries: Sequence[Entry]) -> str | None:
    """The numeric knob with the most values; None where no knob is numeric throughout."""
    counts: dict[str, int] = {}
    for knob in knobs:
        figures = [_numeric(entry.get(knob)) for entry in entries]
        if figures and None not in figures:
            counts[knob] = len(set(figures))
    return max(counts, key=lambda knob: counts[knob]) if counts else None


def _axis(knob: str | None, knobs: str, points: Sequence[KnobPoint]) -> Axis:
    if knob is None:
        return Axis(knobs, "words", tuple(dict.fromkeys(point.x for point in points)))
    values = tuple(sorted({float(point.x) for point in points}))
    steep = values[0] > 0 and values[-1] / values[0] >= LOG_FROM
    return Axis(knob, "log knob" if steep else "knob", values)


def _numeric(value: object) -> float | None:
    """A number, also one that was written as text on a command line."""
    if isinstance(value, str):
        try:
            return number(float(value))
        except ValueError:
            return None
    return number(value)


def _value_text(value: object) -> str:
    """A knob's value as it was given: a whole number whole, words as they are."""
    if isinstance(value, float) and not value.is_integer():
        return significant(value)
    if isinstance(value, float):
        return str(int(value))
    return text(value) if value is None or isinstance(value, bool) else str(value)


def _short_text(value: object) -> str:
    """The same for people: long numbers with their thousands apart."""
    figure = _numeric(value)
    if figure is None or abs(figure) < 10_000 or figure != int(figure):
        return _value_text(value)
    return f"{int(figure):,}"
