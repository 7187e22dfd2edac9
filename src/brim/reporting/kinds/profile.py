"""The page of a profile: the recommendation first, then the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from brim.advice.pareto import ALL_ZERO
from brim.errors import plural
from brim.monitor.trace_file import read_rows
from brim.reporting.base import Column, Fact, Page, Section, Table
from brim.reporting.kinds.profile_figures import (
    Profile,
    accuracy_section,
    front_section,
    latency_section,
    memory_section,
    speed_section,
)
from brim.reporting.kinds.profile_search import common_limit, search_section
from brim.reporting.read import Run
from brim.reporting.rows.points import Point, make_points
from brim.reporting.rows.profile import cost_of, recommended
from brim.reporting.sections.machine import machine_section
from brim.reporting.sections.settings import settings_sections
from brim.reporting.units import bytes_text, count_text, duration_text, interval_text, ratio_text, significant, text

__all__ = ["profile_page"]


def profile_page(run: Run) -> Page:
    """Headline, figures, search, machine, settings."""
    assert run.profile is not None
    document = run.profile
    axis, points = make_points(document["knobs"], document["summary"])
    profile = Profile(document=document, axis=axis, points=points, choice=recommended(document))
    request = run.request
    sections = (
        accuracy_section(profile),
        front_section(profile),
        speed_section(profile),
        memory_section(profile),
        latency_section(profile),
        search_section(profile),
        machine_section(_traces(run, points), limit_bytes=common_limit(points), what=profile.what),
        _all_figures(run, profile),
        *_notes(document),
        *settings_sections(run),
    )
    done = sum(point.done for point in points)
    over = f"over {', '.join(document['knobs'])} on {text(request.get('data'))}"
    return Page(
        title=f"Profile of {text(request.get('model'))}",
        subtitle=f"{over}; {plural(done, 'value')} in {duration_text(document.get('duration_seconds'))}",
        headline=_headline(profile),
        facts=_facts(profile),
        remarks=tuple(line for line in profile.choice.sentences if line != ALL_ZERO),
        warnings=(*(line for line in profile.choice.sentences if line == ALL_ZERO), *_warnings(points)),
        sections=sections,
    )


def _headline(profile: Profile) -> str:
    chosen = profile.choice.chosen
    if chosen is None:
        return "No value can be recommended"
    return f"Recommended: {profile.points[chosen].label.replace('=', ' = ')}"


def _facts(profile: Profile) -> tuple[Fact, ...]:
    """The figures of the point to take, against the most accurate one where that is another."""
    chosen = profile.choice.chosen
    if chosen is None:
        return ()
    point = profile.points[chosen]
    best = max(
        (p for p in profile.points if p.figure("accuracy") is not None),
        key=lambda p: (p.figure("accuracy") or 0.0, p is point),
        default=point,
    )
    beside = "" if best is point else f"best {interval_text(best.figure('accuracy'), None)} at {best.short}"
    facts = [
        Fact(
            name=profile.metric,
            value=interval_text(point.figure("accuracy"), point.figure("accuracy_ci95")),
            note=beside,
        )
    ]
    rate, best_rate = point.figure("samples_per_second"), best.figure("samples_per_second")
    faster = (
        f"{ratio_text(rate / best_rate)} the rate at {best.short}" if rate and best_rate and best is not point else ""
    )
    facts.append(Fact(name="throughput", value=f"{significant(rate)} samples/s", note=faster))
    largest = point.figure("batch_size_max")
    note = f"largest safe {count_text(largest)}" if largest else ""
    facts.append(Fact(name="batch size", value=count_text(point.figure("batch_size_used")), note=note))
    if point.figure("peak_reserved_bytes") is not None:
        limit = f"of {bytes_text(point.figure('limit_bytes'))}" if point.figure("limit_bytes") else ""
        facts.append(Fact(name="reserved memory", value=bytes_text(point.figure("peak_reserved_bytes")), note=limit))
    latency = cost_of(point, "latency_ms")
    if latency is not None:
        facts.append(Fact(name="latency at batch 1", value=f"{significant(latency)} ms", note="median"))
    return tuple(facts)


def _warnings(points: Sequence[Point]) -> tuple[str, ...]:
    failed = [point for point in points if not point.done]
    told = [f"{point.label}: {point.entry.get('error') or point.entry.get('state')}" for point in failed[:5]]
    if len(failed) > len(told):
        told.append(f"and {plural(len(failed) - len(told), 'value')} more were not measured")
    samples = sum(int(point.figure("num_failed") or 0) for point in points)
    if samples:
        told.append(f"{plural(samples, 'sample')} failed and count as wrong; see the values' own samples.jsonl")
    return tuple(told)


def _traces(run: Run, points: Sequence[Point]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Every value's trace in the order they ran."""
    ordered = sorted(points, key=lambda point: str(point.entry.get("started_at") or ""))
    traces = []
    for point in ordered:
        place = run.inside(point.entry.get("folder"))
        if place is not None:
            traces.append((point.short, read_rows(place / "monitor.csv")))
    return traces


def _all_figures(run: Run, profile: Profile) -> Section:
    rows = []
    for point in profile.points:
        place = run.inside(point.entry.get("folder"))
        own = place is not None and (place / "report.html").exists()
        rows.append(
            {
                **point.entry,
                **point.place(),
                "accuracy_shown": interval_text(point.figure("accuracy"), point.figure("accuracy_ci95")),
                "report": quote(f"{point.entry.get('folder')}/report.html") if own else None,
                "latency": cost_of(point, "latency_ms"),
            }
        )
    columns = (
        Column(title=profile.what, field="short", words=True, link="report"),
        Column(title="state", field="state", words=True),
        Column(title=profile.metric, field="accuracy_shown"),
        Column(title="samples/s", field="samples_per_second", show=significant),
        Column(title="batch size", field="batch_size_used", show=count_text),
        Column(title="reserved", field="peak_reserved_bytes", show=bytes_text),
        Column(title="latency (ms)", field="latency", show=significant),
        Column(title="samples", field="num_samples", show=count_text),
        Column(title="OOM events", field="oom_events", show=count_text),
        Column(title="duration", field="duration_seconds", show=duration_text),
        Column(title="error", field="error", words=True),
    )
    table = Table(caption=f"One row for each {profile.what}", columns=columns, rows=rows).known()
    said = ("A linked value leads to its own report.",) if any(row["report"] for row in rows) else ()
    return Section(title="All values", paragraphs=said, table=table, table_open=True)


def _notes(document: Mapping[str, Any]) -> tuple[Section, ...]:
    notes = document.get("notes")
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return (Section(title="Notes", points=lines),) if lines else ()
