"""Profiles over the same knobs: accuracy, throughput and memory in one picture each, and both fronts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.pareto import Candidate, pareto_front
from brim.errors import RequestError, plural
from brim.reporting.base import Column, Page, Panel, Section, Table
from brim.reporting.charts.front import draw_fronts
from brim.reporting.charts.theme import Line, lines_for
from brim.reporting.charts.trend import draw_trend
from brim.reporting.comparisons.base import (
    COMPARISON_SCHEMA,
    DataNote,
    differing_rows,
    header_of,
    labels_of,
    note_on_data,
    run_columns,
    settings_section,
)
from brim.reporting.read import Run, Samples
from brim.reporting.rows.pairs import difference_of, pair_samples
from brim.reporting.rows.points import SEPARATOR, KnobAxis, Point, make_points
from brim.reporting.rows.profile import COSTS, cost_of, recommended
from brim.reporting.units import (
    byte_unit,
    bytes_text,
    count_text,
    interval_text,
    number,
    ratio_text,
    score_text,
    signed_text,
    significant,
)
from brim.reporting.wording import listed, trend_words

__all__ = ["compare_profiles", "profiles_page"]

_FIELDS = (
    "accuracy", "accuracy_ci95", "samples_per_second", "batch_size_used", "peak_allocated_bytes", "peak_reserved_bytes",
    "limit_bytes", "num_samples", "oom_events", "duration_seconds",
)  # fmt: skip


def compare_profiles(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as a document: every value with the figures of each run, paired with the first run's."""
    profiles = [run.profile for run in runs if run.profile is not None]
    knobs = [str(knob) for knob in profiles[0]["knobs"]]
    labels = labels_of([run.folder for run in runs])
    for profile, label in zip(profiles, labels, strict=True):
        if sorted(profile["knobs"]) != sorted(knobs):
            raise RequestError(
                f"{label} is a profile over {', '.join(profile['knobs'])}, {labels[0]} over {', '.join(knobs)}: "
                f"compare profiles over the same knobs"
            )
    data = note_on_data(runs, labels)
    metrics = [str(profile.get("metric") or "accuracy") for profile in profiles]
    notes = []
    if len(set(metrics)) > 1:
        notes.append(f"The runs were scored by different metrics ({', '.join(metrics)}): accuracies do not compare")
    points = _points(runs, profiles, knobs, metrics[0] if len(set(metrics)) == 1 else None, data)
    shared = [point for point in points if all(value is not None for value in point["values"])]
    if not shared:
        notes.append("The runs have no value in common: their curves stand side by side only")
    described = [
        {**header_of(run, label), "metric": metric, "recommended": _recommended(profile, knobs)}
        for run, label, metric, profile in zip(runs, labels, metrics, profiles, strict=True)
    ]
    return {
        "schema": COMPARISON_SCHEMA, "kind": "profile", **data.to_json(), "knobs": knobs, "runs": described,
        "points": points,
        "settings_that_differ": differing_rows(runs), "notes": notes,
    }  # fmt: skip


def _recommended(profile: Mapping[str, Any], knobs: Sequence[str]) -> dict[str, Any] | None:
    chosen = recommended(profile).chosen
    return None if chosen is None else {knob: profile["summary"][chosen].get(knob) for knob in knobs}


def _points(
    runs: Sequence[Run],
    profiles: Sequence[Mapping[str, Any]],
    knobs: Sequence[str],
    metric: str | None,
    data: DataNote,
) -> list[dict[str, Any]]:
    """Every value of any run, in the order they come."""
    entries = [{_name(entry, knobs): entry for entry in profile["summary"]} for profile in profiles]
    names = list(dict.fromkeys(name for one in entries for name in one))
    points = []
    for name in names:
        own = [one.get(name) for one in entries]
        values = [None if entry is None else _figures(entry) for entry in own]
        folders = [_folder(run, entry) for run, entry in zip(runs, own, strict=True)]
        known = next(entry for entry in own if entry is not None)
        against = [
            _difference(values, folders, metric, second, judged=not data.differs[second])
            for second in range(1, len(runs))
        ]
        points.append({**{knob: known.get(knob) for knob in knobs}, "values": values, "differences": [None, *against]})
    return points


def _name(entry: Mapping[str, Any], knobs: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(entry.get(knob)) for knob in knobs)


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"state": entry.get("state"), **{field: number(entry.get(field)) for field in _FIELDS}}


def _folder(run: Run, entry: Mapping[str, Any] | None) -> Path | None:
    return None if entry is None else run.inside(entry.get("folder"))


def _difference(
    values: Sequence[Mapping[str, Any] | None],
    folders: Sequence[Path | None],
    metric: str | None,
    second: int,
    *,
    judged: bool,
) -> dict[str, Any] | None:
    """Second − first: sample by sample where both values kept their samples, else from the two intervals.

    Of runs on different data it is the difference of two means, without an interval to judge it by.
    """
    before, after = values[0], values[second]
    if metric is None or before is None or after is None or before["accuracy"] is None or after["accuracy"] is None:
        return None
    if not judged:
        return {"difference": after["accuracy"] - before["accuracy"], "ci95": None, "count": None, "paired": False}
    both = [folder for folder in (folders[0], folders[second]) if folder is not None]
    if len(both) == 2:
        first, other = (Samples(folder / "samples.jsonl") for folder in both)
        paired = difference_of(pair_samples(first, other, [metric]).changes[metric])
        if paired is not None:
            return {**paired, "paired": True}
    halves = (before["accuracy_ci95"], after["accuracy_ci95"])
    width = None if None in halves else math.hypot(*halves)
    return {"difference": after["accuracy"] - before["accuracy"], "ci95": width, "count": None, "paired": False}


def profiles_page(document: Mapping[str, Any]) -> Page:
    """Accuracy, throughput, memory and fronts, each run a line."""
    view = _View(document)
    sections = (
        view.trend(view.accuracy, "accuracy", score_text, from_zero=False, interval="accuracy_ci95"),
        view.differences(),
        view.fronts(),
        view.trend("Throughput (samples/s)", "samples_per_second", significant),
        view.memory(),
        settings_section(document),
    )
    runs = document["runs"]
    chosen = [
        f"{run['label']} recommends {', '.join(f'{knob}={value}' for knob, value in run['recommended'].items())}"
        for run in runs
        if run["recommended"]
    ]
    return Page(
        title=f"{plural(len(runs), 'profile')} compared",
        subtitle=f"over {', '.join(document['knobs'])}",
        headline=SEPARATOR.join(run["label"] for run in runs),
        remarks=tuple(chosen),
        warnings=(*document["warnings"], *document["notes"]),
        sections=tuple(section for section in sections if section is not None),
    )


class _View:
    """The points of each run on one axis, and the sections drawn of them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.labels = [run["label"] for run in document["runs"]]
        self.axis: KnobAxis
        self.axis, self.points = make_points(document["knobs"], document["points"])
        self.what = SEPARATOR.join(document["knobs"])
        metrics = {run["metric"] for run in document["runs"]}
        self.accuracy = f"Accuracy ({metrics.pop()})" if len(metrics) == 1 else "Accuracy"

    def lines(self) -> list[Line]:
        """One for each run, and with several knobs for each setting of the others as well."""
        others = list(dict.fromkeys(point.line for point in self.points))
        return lines_for([self._line(label, other) for label in self.labels for other in others])

    @staticmethod
    def _line(label: str, other: str) -> str:
        return f"{label}, {other}" if other else label

    def rows(self, field: str) -> list[dict[str, Any]]:
        """Every point of every run that has this figure."""
        return [
            {**point.place(), "line": self._line(label, point.line), "run": place, "y": value[field], "value": value}
            for place, label in enumerate(self.labels)
            for point in self.points
            if (value := point.entry["values"][place]) is not None
        ]

    def trend(
        self, title: str, field: str, show: Callable[[object], str], *, scale: float = 1.0, interval: str | None = None,
        from_zero: bool = True,
    ) -> Section | None:  # fmt: skip
        """A figure over the knob, a line for each run."""
        rows = []
        for row in self.rows(field):
            half = row["value"][interval] if interval else None
            ends = (
                {"low": row["y"] - half, "high": row["y"] + half} if half is not None and row["y"] is not None else {}
            )
            y = None if row["y"] is None else row["y"] / scale
            rows.append({**row, **ends, "value": None, "figure": row["y"], "y": y, "shown": show(row["y"])})
        if all(row["y"] is None for row in rows):
            return None
        lines = self.lines()
        words = [
            f"{label} {trend_words([(row['short'], row['figure']) for row in rows if row['run'] == place], show)}"
            for place, label in enumerate(self.labels)
        ]
        panel = Panel(
            title=title,
            spec=draw_trend(rows, axis=self.axis, lines=lines, title=title, from_zero=from_zero),
            alternative=f"{title} over {self.what}: {'; '.join(words)}.",
            keys=tuple(line.key() for line in lines),
        )
        columns = (self._named(), *run_columns(self.document, show), *self._ratios(field))
        table = Table(caption=f"{title} by {self.what}", columns=columns, rows=self._table(field))
        return Section(title=title.partition(" (")[0], panels=(panel,), table=table)

    def memory(self) -> Section | None:
        """Peak reserved memory, in one unit."""
        unit = byte_unit(row["y"] for row in self.rows("peak_reserved_bytes"))
        return self.trend(f"Reserved memory ({unit.name})", "peak_reserved_bytes", bytes_text, scale=unit.size)

    def differences(self) -> Section | None:
        """How much more accurate each other run is than the first, at each value."""
        rows = []
        for point in self.points:
            for place, change in enumerate(point.entry["differences"]):
                if change is None:
                    continue
                half = change["ci95"]
                ends = {} if half is None else {"low": change["difference"] - half, "high": change["difference"] + half}
                rows.append({
                    **point.place(), **ends, "line": self._line(self.labels[place], point.line),
                    "y": change["difference"], "shown": signed_text(change["difference"], half),
                    "count": change["count"], "how": "sample by sample" if change["paired"] else "from two means",
                })  # fmt: skip
        if not rows:
            return None
        used = {row["line"] for row in rows}
        lines = [line for line in self.lines() if line.label in used]
        beyond = [row["short"] for row in rows if row.get("low") is not None and row["low"] * row["high"] > 0]
        words = f"The interval leaves zero out at {listed(beyond)}" if beyond else "No interval leaves zero out"
        if self.document["data_differs"]:
            words += ", and runs on different data have none"
        panel = Panel(
            title=f"Accuracy less that of {self.labels[0]}",
            spec=draw_trend(rows, axis=self.axis, lines=lines, title="difference", from_zero=True, zero_rule=True),
            alternative=f"Differences from {self.labels[0]} over {self.what}. {words}.",
            keys=tuple(line.key() for line in lines),
        )
        columns = (
            self._named(),
            Column(title="run", field="line", words=True),
            Column(title="difference", field="shown"),
            Column(title="samples", field="count", show=count_text),
            Column(title="how", field="how", words=True),
        )
        table = Table(caption=f"Differences in accuracy by {self.what}", columns=columns, rows=rows).known()
        return Section(title="Difference in accuracy", panels=(panel,), table=table)

    def fronts(self) -> Section | None:
        """Accuracy against time per sample, and the front of each run."""
        cost = COSTS["seconds_per_sample"]
        rows: list[dict[str, Any]] = []
        for place, label in enumerate(self.labels):
            own = [self._costed(point, place, label) for point in self.points]
            known = sorted((row for row in own if row is not None), key=lambda row: (row["cost"], -row["y"]))
            front = pareto_front([row["candidate"] for row in known])
            rows += [{**row, "candidate": None, "front": row["candidate"] in front} for row in known]
        if not rows:
            return None
        lines = lines_for(self.labels)
        words = [
            f"{label}: {listed([row['short'] for row in rows if row['line'] == label and row['front']], most=14)}"
            for label in self.labels
        ]
        title = f"{cost.title} ({cost.unit})"
        panel = Panel(
            title=f"Accuracy against {cost.title}",
            spec=draw_fronts(rows, lines=lines, x_title=title, y_title="accuracy", what=self.what),
            alternative=f"On the fronts: {'; '.join(words)}.",
            keys=tuple(line.key() for line in lines),
        )
        columns = (
            self._named(),
            Column(title="run", field="line", words=True),
            Column(title=title, field="cost", show=significant),
            Column(title="accuracy", field="shown"),
            Column(title="on the front", field="front", words=True),
        )
        return Section(
            title="Accuracy against cost",
            panels=(panel,),
            table=Table(caption="Points by cost", columns=columns, rows=rows),
        )

    def _costed(self, point: Point, place: int, label: str) -> dict[str, Any] | None:
        value = point.entry["values"][place]
        if value is None or value["accuracy"] is None:
            return None
        cost = cost_of(Point(index=0, label="", short="", x=0.0, line="", entry=value), "seconds_per_sample")
        if cost is None:
            return None
        return {
            **point.place(), "line": label, "y": value["accuracy"], "cost": cost,
            "shown": interval_text(value["accuracy"], value["accuracy_ci95"]),
            "cost_shown": COSTS["seconds_per_sample"].text(cost),
            "candidate": Candidate(
                values={knob: point.entry[knob] for knob in self.document["knobs"]},
                accuracy=value["accuracy"],
                cost=cost,
            ),
        }  # fmt: skip

    def _named(self) -> Column:
        return Column(title=self.what, field="short", words=True)

    def _ratios(self, field: str) -> tuple[Column, ...]:
        if field == "accuracy":
            return ()
        return tuple(
            Column(title=f"{label} ÷ {self.labels[0]}", field=f"ratio-{place}", show=ratio_text)
            for place, label in enumerate(self.labels)
            if place > 0
        )

    def _table(self, field: str) -> list[dict[str, Any]]:
        rows = []
        for point in self.points:
            figures = [None if value is None else value[field] for value in point.entry["values"]]
            row: dict[str, Any] = {**point.place(), **{str(place): figure for place, figure in enumerate(figures)}}
            for place, figure in enumerate(figures[1:], 1):
                row[f"ratio-{place}"] = figure / figures[0] if figure is not None and figures[0] else None
            rows.append(row)
        return rows
