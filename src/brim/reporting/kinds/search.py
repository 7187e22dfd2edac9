"""The page of a search, and of any kind of run that has no file of its own: what its record says, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, value_at
from brim.errors import plural
from brim.reporting.base import (
    Fact,
    Page,
    PageTable,
    RunKind,
    Section,
    facts,
    note_section,
    present,
    run_columns,
    words,
)
from brim.reporting.kinds.compared import (
    by_place,
    comparison_document,
    difference_section,
    header_of,
    labels_of,
    note_on_data,
)
from brim.reporting.machine import machine_section
from brim.reporting.repeat import flat_rows, repeat_sections
from brim.reporting.search import plan_section
from brim.units import bytes_text, count_text, duration_text, number, short_name, significant, text

__all__ = ["SEARCH", "compare_others", "other_page", "search_page"]

SHOWN_SECONDS = 0.05  # a forecast that took less is not named, as on the console

_OF_THE_PLAN = ("unit", "size", "batch_size_max", "batch_size_max_estimate", "objective", "reason", "device", "memory")


def search_page(run: Run) -> Page:
    """Headline, probes, settings."""
    plan = run.plan
    cached = Section(title="Batch-size search", paragraphs=("The plan came from the cache: no size was tried.",))
    return Page(
        title=f"Batch size for {short_name(run.request.get('model'))}",
        subtitle=f"{text(run.request.get('mode') or 'default')} workload on {text(plan.get('device'))}",
        headline=f"Batch size {count_text(plan.get('size'))}: {text(plan.get('reason'))}",
        facts=_facts(run),
        sections=present(plan_section(plan) or cached, note_section(plan.get("notes")), *repeat_sections(run)),
    )


def _facts(run: Run) -> tuple[Fact, ...]:
    plan = run.plan
    taken = [one for one in entries(plan.get("probes")) if one.get("batch_size") == plan.get("size")]
    best: Mapping[str, Any] = next((one for one in reversed(taken) if one.get("verdict") == "fits"), {})
    estimate, largest = number(plan.get("batch_size_max_estimate")), number(plan.get("batch_size_max"))
    expected = f"about {count_text(estimate)} expected" if estimate and largest and estimate > largest else ""
    headroom = number(value_at(plan, "memory.headroom_bytes"))
    total, traced = (number(value_at(plan, f"seconds.{part}")) for part in ("total", "forecast"))
    forecast = f"{duration_text(traced)} of it for the forecast" if (traced or 0) >= SHOWN_SECONDS else ""
    return facts(
        Fact("throughput", f"{significant(best.get('samples_per_second'))} samples/s"),
        Fact("reserved memory", bytes_text(best.get("peak_reserved_bytes")), "peak"),
        Fact("largest seen to fit", count_text(largest), expected),
        Fact("memory limit", bytes_text(run.limit_bytes), f"{bytes_text(headroom)} left" if headroom else ""),
        Fact("search", duration_text(total), forecast),
    )


def other_page(run: Run) -> Page:
    """Everything that the run says of itself."""
    named = (words("figure", "name"), words("value"))
    tables = [
        Section(title=title, table=PageTable(title, named, flat_rows(document)))
        for title, document in (("Summary", run.summary), ("Plan", run.plan))
        if document
    ]
    trace = run.trace()
    return Page(
        title=f"{run.kind.capitalize()} of {short_name(run.request.get('model'))}",
        subtitle=f"took {run.duration}",
        sections=present(
            *tables, machine_section([("", trace)], limit_bytes=None) if trace else None, *repeat_sections(run)
        ),
    )


def compare_others(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """Every figure of the summaries and plans, by run."""
    labels = labels_of([run.folder for run in runs])
    flat = []
    for run in runs:
        plan = {name: run.plan[name] for name in _OF_THE_PLAN if name in run.plan}
        flat.append({row["name"]: row["value"] for row in [*flat_rows(run.summary), *flat_rows({"plan": plan})]})
    names = dict.fromkeys(name for one in flat for name in one)
    document = comparison_document(
        runs,
        note_on_data(runs, labels),
        runs=[header_of(run, label) for run, label in zip(runs, labels, strict=True)],
        figures=[{"name": name, "values": [one.get(name) for one in flat]} for name in names],
        notes=[],
    )
    rows = [{"name": row["name"], **by_place(row["values"])} for row in document["figures"]]
    columns = (words("figure", "name"), *run_columns(labels, words=True))
    figures = Section(title="Figures", table=PageTable("Figures of each run", columns, rows))
    return document, Page(
        title=f"{plural(len(runs), 'run')} compared ({document['kind']})",
        subtitle=" · ".join(labels),
        warnings=tuple(document["warnings"]),
        sections=(figures, difference_section(document)),
    )


SEARCH = RunKind(name="find", page=search_page)
