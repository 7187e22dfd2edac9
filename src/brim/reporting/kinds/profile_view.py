"""A profile, or several over the same knobs, on one axis: the trends over the knob and accuracy against cost.

A single profile and a comparison show the same sections from here; with several runs each is a line. One numeric knob
is the axis. Of several, the one with the most values is, and the others tell the lines apart. A knob without numbers
(`dtype`) becomes an axis of words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from brim.advice.run_reader import mapping, value_at
from brim.reporting.base import Column, PageTable, Section, present, words
from brim.reporting.charts import Axis, Chart, Row, crosses, front_chart, interval_ends, limit_line, line_chart, rings
from brim.reporting.theme import Series, series_for
from brim.units import byte_unit, bytes_text, interval_text, listed, number, score_text, significant, text

__all__ = [
    "COSTS", "SEPARATOR", "Cost", "KnobPoint", "ProfileView", "Recommended", "Trend", "cost_of", "make_points",
    "recommended",
]  # fmt: skip

_ONLY = "all values"  # the one line of a profile over one knob
SEPARATOR = "\u00a0·\u00a0"  # between the values of several knobs; a line does not break there
LOG_FROM = 16.0  # the largest value over the smallest, from where on steps are multiples and not differences

Entry = Mapping[str, Any]  # of a profile's summary


@dataclasses.dataclass(frozen=True)
class Cost:
    """A quantity that accuracy is weighed against: less is better."""

    title: str
    unit: str = ""

    @property
    def axis(self) -> str:
        """Its name with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, value: object) -> str:
        """The figure with its unit."""
        return f"{significant(value)} {self.unit}".strip()


COSTS = {
    "seconds_per_sample": Cost("time per sample", "ms"),
    "latency_ms": Cost("latency at batch 1 (p50)", "ms"),
    "peak_reserved_bytes": Cost("peak reserved memory", "GiB"),
}


def cost_of(entry: Mapping[str, Any], cost: str) -> float | None:
    """What an entry costs, in the unit of `COSTS`."""
    if cost == "seconds_per_sample":
        rate = number(entry.get("samples_per_second"))
        return 1000 / rate if rate else None
    if cost == "latency_ms":
        return number(value_at(entry, "latency_ms.batch_1.total.p50"))
    figure = number(entry.get(cost))
    return figure / 2**30 if figure is not None and cost == "peak_reserved_bytes" else figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommended:
    """Which points a profile recommends, by their place in the summary."""

    cost: str
    front: tuple[int, ...]
    chosen: int | None  # the one to take
    roles: Mapping[int, tuple[str, ...]]  # in words: recommended, most accurate, …
    sentences: tuple[str, ...]


def recommended(profile: Mapping[str, Any]) -> Recommended:
    """The recommendation of the document; without one, nothing is chosen."""
    given = mapping(profile.get("recommendation"))
    count = len(profile["summary"])

    def place(field: str) -> int | None:
        index = given.get(field)
        return index if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count else None

    within, best = place("cheapest_within"), place("best")
    chosen = best if within is None else within
    roles: dict[int, tuple[str, ...]] = {}
    named = (
        (chosen, "recommended"), (best, "most accurate"), (place("cheapest_meeting_latency"), "meets the latency"),
        (place("cheapest_meeting_memory"), "meets the memory"),
    )  # fmt: skip
    for index, role in named:
        if index is not None:
            roles[index] = (*roles.get(index, ()), role)
    front, sentences = given.get("front"), given.get("text")
    return Recommended(
        cost=str(given.get("cost") or "seconds_per_sample"),
        front=tuple(i for i in front if isinstance(i, int) and 0 <= i < count) if isinstance(front, list) else (),
        chosen=chosen,
        roles=roles,
        sentences=tuple(str(line) for line in sentences) if isinstance(sentences, list) else (),
    )


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
        at = _short_text(self.x) if self.line else self.short
        return {"index": self.index, "label": label, "at": at, "short": self.short, "x": self.x, "line": self.line}


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


@dataclasses.dataclass(frozen=True)
class Trend:
    """A figure over the knob, declared once for a profile and for a comparison."""

    title: str
    field: str
    show: Callable[[object], str]
    half: str = ""  # the field with the half width of its interval
    score: bool = False  # not from zero, and within 0 and 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileView:
    """What every section reads."""

    knobs: Sequence[str]
    metric: str
    axis: Axis
    points: Sequence[KnobPoint]
    labels: tuple[str, ...] = ("",)  # of the runs, where there are several
    chosen: int | None = None  # of a single profile

    @property
    def what(self) -> str:
        """What the short name of a point stands for: the knob, or the knobs."""
        return SEPARATOR.join(self.knobs)

    @property
    def accuracy(self) -> Trend:
        title = f"Accuracy ({self.metric})" if self.metric else "Accuracy"
        return Trend(title, "accuracy", score_text, "accuracy_ci95", score=True)

    def line(self, run: int, point: KnobPoint) -> str:
        """The line that a point lies on: its run, and the setting of the other knobs."""
        return ", ".join(part for part in (self.labels[run], point.line) if part) or _ONLY

    def series(self) -> list[Series]:
        """Every line."""
        return series_for(
            list(dict.fromkeys(self.line(run, point) for run in range(len(self.labels)) for point in self.points))
        )

    def failed(self) -> list[dict[str, Any]]:
        """The values of a single profile that were not measured, and why."""
        return [
            {**point.place(), "reason": str(point.entry.get("error") or point.entry.get("state"))}
            for point in self.points
            if len(self.labels) == 1 and not point.done
        ]

    def rows(self, trend: Trend, *, size: float = 1.0) -> list[dict[str, Any]]:
        """The figure at every point of every run."""
        rows = []
        for run in range(len(self.labels)):
            for point in self.points:
                value, half = point.figure(trend.field, run), point.figure(trend.half, run) if trend.half else None
                shown = interval_text(value, half) if trend.half else trend.show(value)
                rows.append(
                    {**point.place(), "line": self.line(run, point), "y": None if value is None else value / size,
                     **interval_ends(value, half), "shown": shown, "chosen": point.index == self.chosen,
                     "hollow": trend.score and bool(point.entry.get("saturated"))}
                )  # fmt: skip
        return rows

    def chart(
        self,
        title: str,
        rows: Sequence[Row],
        y: Axis,
        *,
        series: Sequence[Series] = (),
        limit: float | None = None,
        note: str = "",
    ) -> Chart | None:
        """Rows over the knob."""
        chosen = [row for row in rows if row["chosen"]]
        marked = (rings(chosen), *crosses(self.failed()), limit_line(limit))
        return line_chart(title, rows, x=self.axis, y=y, series=series or self.series(), marked=marked, note=note)

    def trend(self, trend: Trend) -> Chart | None:
        """A figure over the knob, a line for each run; bytes in one unit."""
        title, size = trend.title, 1.0
        if trend.show is bytes_text:
            counts = [point.figure(trend.field, run) for point in self.points for run in range(len(self.labels))]
            unit = byte_unit(counts)
            title, size = f"{title} ({unit.name})", float(unit.size)
        return self.chart(title, self.rows(trend, size=size), Axis(title, "score" if trend.score else "zero"))

    def table(self, caption: str, columns: Sequence[Column], rows: Sequence[Row] | None = None) -> PageTable:
        """Rows by point; by default what the first run measured."""
        measured = [{**point.entry, **point.place()} for point in self.points] if rows is None else rows
        return PageTable(f"{caption} by {self.what}", (words(self.what, "short"), *columns), measured)

    def front_rows(self, cost: str, fronts: Sequence[Collection[int]], choice: Recommended | None) -> list[Row]:
        """Every point that has both an accuracy and a cost, and whether it is on the front of its run."""
        unit = COSTS.get(cost, Cost(cost.replace("_", " ")))
        rows: list[Row] = []
        for run, front in enumerate(fronts):
            for point in self.points:
                entry = point.entries[run] or {}
                value, half, spent = (
                    number(entry.get("accuracy")),
                    number(entry.get("accuracy_ci95")),
                    cost_of(entry, cost),
                )
                if value is None or spent is None:
                    continue
                roles = () if choice is None else choice.roles.get(point.index, ())
                rows.append(
                    {**point.place(), "line": self.labels[run] or _ONLY, "x": spent, "y": value, "low": None,
                     "high": None, **interval_ends(value, half), "shown": interval_text(value, half),
                     "cost_shown": unit.text(spent), "front": point.index in front,
                     "chosen": choice is not None and point.index == choice.chosen, "roles": ", ".join(roles)}
                )  # fmt: skip
        return rows

    def front_section(self, cost: str, rows: Sequence[Row]) -> Section:
        """Accuracy against cost, the front of each run, and the point to take."""
        unit = COSTS.get(cost, Cost(cost.replace("_", " ")))
        metric = self.metric or "accuracy"
        title = "Accuracy against cost"
        if not rows:
            return Section(title=title, paragraphs=("No value has both an accuracy and a cost.",))
        several = len(self.labels) > 1
        ordered = sorted(rows, key=lambda row: (row["line"], row["x"]) if several else row["x"])
        fronts = []
        for label in self.labels:
            names = [row["short"] for row in ordered if row["front"] and row["line"] == (label or _ONLY)]
            fronts.append(f"{label}: {listed(names) or 'none'}" if several else listed(names) or "none")
        chosen = next((row for row in rows if row["chosen"]), None)
        caption = f"{metric} over {unit.axis}. On the front: {'; '.join(fronts)}."
        if chosen is not None:
            caption += f" Recommended: {chosen['short']}, {metric} {chosen['shown']} at {chosen['cost_shown']}."
        chart = front_chart(
            f"{metric} against {unit.title}", ordered, x=Axis(unit.axis, "knob"), figure=metric, what=self.what,
            caption=caption, series=series_for(self.labels) if several else (),
        )  # fmt: skip
        columns = (
            words(self.what, "short"), *((words("run", "line"),) if several else ()),
            Column(unit.axis, "x", significant), Column(metric, "shown"), words("on the front", "front"),
            words("role", "roles"),
        )  # fmt: skip
        said = (
            "A point is on the front where no other is as accurate and cheaper, or as cheap and more accurate; of "
            "points with the same accuracy it is the one with the smallest values."
        )
        table = PageTable("Points by cost", columns, ordered)
        return Section(title=title, paragraphs=(said,), charts=present(chart), table=table)
