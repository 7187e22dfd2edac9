"""A forecast as a page: memory over batch size, by what it is for, under the line of what the card has; by module.

For `brim forecast --plot`, and for the folders of `brim forecast -o`, also of several workloads and their check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping
from brim.errors import plural
from brim.planning.forecast_base import shown_size, sizes_of
from brim.records import PART_NAMES
from brim.reporting.base import Column, Fact, Page, PageTable, RunKind, Section, note_section, present, words
from brim.reporting.charts import Axis, Chart, bar_chart, limit_line
from brim.reporting.repeat import repeat_sections
from brim.reporting.theme import series_for
from brim.settings.sizes import format_bytes
from brim.units import bytes_text, count_text, fraction_text, short_name

__all__ = ["FORECAST", "forecast_page", "recorded_page"]

GIB = 2**30
# Ten parts are too many to distinguish: what stays whatever the batch, what grows with it, what is not torch's own.
GROUPS = {
    "model": ("weights", "gradients", "optimizer_state"),
    "batch": ("inputs", "activations", "kv_cache", "temporary"),
    "workspaces": ("workspaces", "communication"),
    "cached": ("cached",),
    "context": ("context",),
}
GROUP_NAMES = {
    "model": "weights, gradients, optimizer",
    "batch": "batch, activations, temporary",
    "workspaces": "workspaces",
    "cached": "cached by the allocator",
    "context": "CUDA context",
}

Document = Mapping[str, Any]


def forecast_page(documents: Sequence[Document]) -> Page:
    """One section for each card."""
    first = documents[0]
    return Page(
        title=f"Forecast: {short_name(first['model'])}",
        subtitle=f"{first['mode']}, traced in {max(d.get('trace_seconds', 0) for d in documents):.1f} s without a GPU",
        headline=_headline(documents),
        facts=tuple(
            Fact(f"largest batch on {one['gpu']['key']}", count_text(one["batch_size_max"])) for one in documents
        ),
        remarks=tuple(dict.fromkeys(note for document in documents for note in document["notes"])),
        warnings=tuple(dict.fromkeys(f"Approximate: {d['approximate']}" for d in documents if d["approximate"])),
        sections=tuple(section for document in documents for section in _sections(document)),
    )


def _headline(documents: Sequence[Document]) -> str:
    answers = [
        f"{one['batch_size_max']:,} on {one['gpu']['name']}"
        if one["batch_size_max"]
        else f"none on {one['gpu']['name']}"
        for one in documents
    ]
    return f"Largest batch size that fits: {', '.join(answers)}"


def recorded_page(run: Run) -> Page:
    """The forecasts of a record: of one workload as `forecast_page`, of several each under its name."""
    workloads = entries(run.summary.get("workloads"))
    check = present(_check_section(mapping(run.summary.get("check"))))
    beside = present(note_section(run.summary.get("notes")), *repeat_sections(run))
    if len(workloads) == 1 and workloads[0].get("forecasts"):
        page = forecast_page(workloads[0]["forecasts"])
        return dataclasses.replace(page, sections=(*check, *page.sections, *beside))
    sections = [
        section
        for workload in workloads
        for document in workload.get("forecasts", ())
        for section in _sections(document, of=f"{workload['name']}, ")
    ]
    failed = tuple(f"{one['name']}: {one['error']}" for one in workloads if one.get("error"))
    return Page(
        title=f"Forecast of {plural(len(workloads), 'workload')}",
        subtitle=str(run.request.get("file") or ""),
        warnings=failed,
        sections=(*check, *sections, *beside),
    )


def _check_section(check: Mapping[str, Any]) -> Section | None:
    """The verdicts of a check; None where there was none."""
    lines = entries(check.get("workloads"))
    if not lines:
        return None
    rows = []
    for line in lines:
        sizes = entries(line.get("sizes"))
        worst = max(sizes, key=lambda one: (one["change_bytes"] - one["allowed_bytes"], one["batch_size"]), default={})
        rows.append({**worst, "name": line["name"], "verdict": line["verdict"], "text": line["text"]})
    columns = (
        words("workload", "name"), words("verdict"), words("card", "gpu"),
        Column("batch size", "batch_size", count_text), Column("base", "base_bytes", bytes_text),
        Column("now", "bytes", bytes_text),
        Column("change", "change_fraction", fraction_text), words("why", "text"),
    )  # fmt: skip
    compared = check.get("against")
    return Section(
        title="Check",
        paragraphs=present(f"Against {compared}, growth allowed: {check['allow']}." if compared else None),
        points=tuple(map(str, check.get("notes") or ())),
        table=PageTable("Peak allocated bytes before and now" if compared else "Verdicts", columns, rows),
    )  # fmt: skip


def _sections(document: Document, of: str = "") -> tuple[Section, ...]:
    return present(_section(document, of), _module_section(document, of))


def _module_section(document: Document, of: str) -> Section | None:
    """The bytes by module at the peak of the size that is worth seeing; None where they were not asked for."""
    size = shown_size(document)
    found = entries(size.get("by_module"))
    if not found:
        return None
    rows = [
        {**row["parts"], "module": row["module"] or "(the model itself)", "bytes": row["bytes"],
         "share": row["bytes"] / size["peak_allocated_bytes"]}
        for row in found
    ]  # fmt: skip
    parts = [part for part in PART_NAMES if any(row.get(part) for row in rows)]
    columns = (
        words("module"),
        Column("bytes", "bytes", bytes_text),
        Column("share", "share", fraction_text),
        *(Column(PART_NAMES[part], part, bytes_text) for part in parts),
    )
    said = (
        f"The {format_bytes(size['peak_allocated_bytes'])} that tensors have at the peak of batch size "
        f"{size['batch_size']:,}, by the module whose forward or backward took them. A row has what is not in a row "
        "of its own further down; what no module takes is in brackets."
    )
    return Section(
        title=f"{of}{document['gpu']['name']}: memory by module",
        paragraphs=(said,),
        table=PageTable("Bytes at the peak by module", columns, rows),
    )


def _section(document: Document, of: str = "") -> Section:
    rows = [_row(size) for size in sizes_of(document)]
    card = document["gpu"]
    limit = document["limit_bytes"]
    said = (
        f"{card['name']} has {format_bytes(card['memory_bytes'])}; {format_bytes(limit)} may be used "
        f"(margin {document['margin']:.0%}). Largest batch size that fits: {document['batch_size_max'] or 'none'}."
    )
    parts = [part for part in PART_NAMES if any(row.get(part) for row in rows)]
    columns = (
        Column("batch size", "batch_size", count_text),
        words("fits"),
        Column("as nvidia-smi shows", "device_bytes", bytes_text),
        Column("reserved", "peak_reserved_bytes", bytes_text),
        Column("allocated", "peak_allocated_bytes", bytes_text),
        *(Column(PART_NAMES[part], part, bytes_text) for part in parts),
    )
    return Section(
        title=f"{of}{card['name']}",
        paragraphs=(said,),
        charts=present(_chart(rows, limit, f"Memory by batch size, stacked by what it is for. {said}")),
        table=PageTable("Every size forecast", columns, rows),
    )


def _row(size: Mapping[str, Any]) -> dict[str, Any]:
    return {**size, **size["breakdown"]}


def _chart(rows: Sequence[Mapping[str, Any]], limit_bytes: int, caption: str) -> Chart | None:
    """Stacked bars under a rule."""
    stacked = [
        {
            "x": str(row["batch_size"]), "label": str(row["batch_size"]), "line": GROUP_NAMES[group], "place": place,
            "y": size / GIB, "shown": format_bytes(size),
        }
        for row in rows
        for place, (group, parts) in enumerate(GROUPS.items())
        for size in [sum(row.get(part, 0) for part in parts)]
    ]  # fmt: skip
    return bar_chart(
        "Memory on the card (GiB)", stacked, x=Axis("batch size"), figure="memory", caption=caption,
        series=series_for(list(GROUP_NAMES.values())), marked=[limit_line(limit_bytes / GIB, "to use")],
    )  # fmt: skip


FORECAST = RunKind(name="forecast", page=recorded_page)
