"""Profiles over the same knobs: accuracy, throughput and memory in one picture each, and the front of each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.advice.run_reader import Run, Samples
from brim.errors import RequestError, plural
from brim.profiling.pareto import Candidate, pareto_front
from brim.reporting.base import Column, Page, RunKind, Section, present, run_columns, words
from brim.reporting.charts import Axis, limit_line, line_chart
from brim.reporting.kinds.compared import (
    DataNote,
    by_place,
    comparison_document,
    difference_section,
    header_of,
    labels_of,
    note_on_data,
)
from brim.reporting.kinds.profile import THROUGHPUT, profile_page
from brim.reporting.kinds.profile_view import SEPARATOR, ProfileView, Trend, cost_of, make_points, recommended
from brim.reporting.kinds.sample_pairs import difference_of, pair_samples
from brim.units import bytes_text, count_text, listed, number, ratio_text, signed_text

__all__ = ["PROFILE", "compare_profiles"]

RESERVED = Trend("Reserved memory", "peak_reserved_bytes", bytes_text)
_FIELDS = (
    "accuracy", "accuracy_ci95", "samples_per_second", "batch_size_used", "peak_allocated_bytes", "peak_reserved_bytes",
    "limit_bytes", "num_samples", "oom_events", "duration_seconds",
)  # fmt: skip

Entry = Mapping[str, Any]


def compare_profiles(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """Every value with the figures of each run, paired with the first run's."""
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
    same = len(set(metrics)) == 1
    points = _points(runs, profiles, knobs, metrics[0] if same else None, data)
    shared = any(all(value is not None for value in point["values"]) for point in points)
    notes = present(
        None
        if same
        else f"The runs were scored by different metrics ({', '.join(metrics)}): accuracies do not compare",
        None if shared else "The runs have no value in common: their curves stand side by side only",
    )
    described = [
        {**header_of(run, label), "metric": metric, "recommended": _recommended(profile, knobs)}
        for run, label, metric, profile in zip(runs, labels, metrics, profiles, strict=True)
    ]
    document = comparison_document(runs, data, knobs=knobs, runs=described, points=points, notes=list(notes))
    return document, _page(document, metrics[0] if same else "")


def _recommended(profile: Mapping[str, Any], knobs: Sequence[str]) -> dict[str, Any] | None:
    chosen = recommended(profile).chosen
    return None if chosen is None else {knob: profile["summary"][chosen].get(knob) for knob in knobs}


def _points(
    runs: Sequence[Run], profiles: Sequence[Mapping[str, Any]], knobs: Sequence[str], metric: str | None, data: DataNote
) -> list[dict[str, Any]]:
    """Every value of any run, in the order they come."""
    found = [{tuple(str(e.get(knob)) for knob in knobs): e for e in profile["summary"]} for profile in profiles]
    points = []
    for name in dict.fromkeys(name for one in found for name in one):
        own: list[Entry | None] = [one.get(name) for one in found]
        values = [None if entry is None else _figures(entry) for entry in own]
        folders = [run.inside(entry.get("folder")) if entry else None for run, entry in zip(runs, own, strict=True)]
        known = next(entry for entry in own if entry is not None)
        against = [
            _difference(values, folders, metric, second, judged=not data.differs[second])
            for second in range(1, len(runs))
        ]
        points.append({**{knob: known.get(knob) for knob in knobs}, "values": values, "differences": [None, *against]})
    return points


def _figures(entry: Entry) -> dict[str, Any]:
    return {"state": entry.get("state"), **{field: number(entry.get(field)) for field in _FIELDS}}


def _difference(
    values: Sequence[Entry | None], folders: Sequence[Path | None], metric: str | None, second: int, *, judged: bool
) -> dict[str, Any] | None:
    """Second − first: sample by sample where both values kept their samples, else from the two intervals.

    Of runs on different data it is the difference of two means, without an interval to judge it by.
    """
    before, after = values[0], values[second]
    if metric is None or before is None or after is None or before["accuracy"] is None or after["accuracy"] is None:
        return None
    means = {"difference": after["accuracy"] - before["accuracy"], "ci95": None, "count": None, "paired": False}
    if not judged:
        return means
    first, other = folders[0], folders[second]
    if first is not None and other is not None:
        before_lines, after_lines = (Samples(folder / "samples.jsonl") for folder in (first, other))
        paired = difference_of(pair_samples(before_lines, after_lines, [metric]).changes[metric])
        if paired is not None:
            return {**paired, "paired": True}
    halves = (before["accuracy_ci95"], after["accuracy_ci95"])
    return {**means, "ci95": None if None in halves else math.hypot(*halves)}


def _page(document: Mapping[str, Any], metric: str) -> Page:
    """Accuracy, throughput, memory and fronts, each run a line."""
    runs = document["runs"]
    labels = tuple(run["label"] for run in runs)
    measured = [point["values"] for point in document["points"]]
    axis, points = make_points(document["knobs"], document["points"], measured)
    view = ProfileView(knobs=document["knobs"], metric=metric, axis=axis, points=points, labels=labels)
    cost = "seconds_per_sample"
    rows = view.front_rows(cost, [_front(document, run, cost) for run in range(len(runs))], None)
    chosen = [
        f"{run['label']} recommends {', '.join(f'{knob}={value}' for knob, value in run['recommended'].items())}"
        for run in runs
        if run["recommended"]
    ]
    return Page(
        title=f"{plural(len(runs), 'profile')} compared",
        subtitle=f"over {', '.join(document['knobs'])}",
        headline=SEPARATOR.join(labels),
        remarks=tuple(chosen),
        warnings=(*document["warnings"], *document["notes"]),
        sections=present(
            _trend_section(view, view.accuracy),
            _difference_section(view, document),
            view.front_section(cost, rows) if rows else None,
            _trend_section(view, THROUGHPUT),
            _trend_section(view, RESERVED),
            difference_section(document),
        ),
    )


def _front(document: Mapping[str, Any], run: int, cost: str) -> set[int]:
    """The places of the points that nothing of the same run beats."""
    known = {}
    for place, point in enumerate(document["points"]):
        entry = point["values"][run] or {}
        accuracy, spent = number(entry.get("accuracy")), cost_of(entry, cost)
        if accuracy is not None and spent is not None:
            values = {knob: point[knob] for knob in document["knobs"]}
            known[place] = Candidate(values=values, accuracy=accuracy, cost=spent)
    ordered = sorted(known, key=lambda place: (known[place].cost, -known[place].accuracy))
    front = pareto_front([known[place] for place in ordered])
    return {place for place in ordered if known[place] in front}


def _trend_section(view: ProfileView, trend: Trend) -> Section | None:
    """A figure over the knob, a line for each run; and how many times the first run's the others are."""
    chart = view.trend(trend)
    if chart is None:
        return None
    rows = []
    for point in view.points:
        figures = [point.figure(trend.field, run) for run in range(len(view.labels))]
        ratios = {
            f"ratio-{run}": figure / figures[0]
            for run, figure in enumerate(figures)
            if run and figure is not None and figures[0]
        }
        rows.append({**point.place(), **by_place(figures), **({} if trend.score else ratios)})
    columns = (
        *run_columns(view.labels, trend.show),
        *(
            Column(f"{label} ÷ {view.labels[0]}", f"ratio-{run}", ratio_text)
            for run, label in enumerate(view.labels)
            if run
        ),
    )
    table = view.table(chart.title, columns, rows)
    return Section(title=trend.title.partition(" (")[0], charts=(chart,), table=table)


def _difference_section(view: ProfileView, document: Mapping[str, Any]) -> Section | None:
    """How much more accurate each other run is than the first, at each value."""
    rows = []
    for point, entry in zip(view.points, document["points"], strict=True):
        for run, change in enumerate(entry["differences"]):
            if change is None:
                continue
            half = change["ci95"]
            ends = {} if half is None else {"low": change["difference"] - half, "high": change["difference"] + half}
            rows.append({
                **point.place(), **ends, "line": view.line(run, point), "y": change["difference"],
                "shown": signed_text(change["difference"], half), "count": change["count"],
                "how": "sample by sample" if change["paired"] else "from two means",
            })  # fmt: skip
    if not rows:
        return None
    beyond = [row["short"] for row in rows if row.get("low") is not None and row["low"] * row["high"] > 0]
    said = f"The interval leaves zero out at {listed(beyond)}" if beyond else "No interval leaves zero out"
    said += ", and runs on different data have none" if document["data_differs"] else ""
    used = {row["line"] for row in rows}
    series = [one for one in view.series() if one.label in used]
    chart = line_chart(
        f"Accuracy less that of {view.labels[0]}", rows, x=view.axis, y=Axis("difference", "zero"), series=series,
        marked=[limit_line(0.0, "")], caption=f"Differences from {view.labels[0]} over {view.what}. {said}.",
    )  # fmt: skip
    columns = (
        words("run", "line"), Column("difference", "shown"), Column("samples", "count", count_text), words("how"),
    )  # fmt: skip
    table = view.table("Differences in accuracy", columns, rows)
    return Section(title="Difference in accuracy", charts=present(chart), table=table)


PROFILE = RunKind(name="profile", page=profile_page, compare=compare_profiles)
