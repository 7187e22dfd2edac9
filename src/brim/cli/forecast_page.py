"""A forecast as a page: memory over batch size, stacked by what it is for, under the line of what the card has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.cli.forecast import PART_NAMES, sizes_of
from brim.reporting.base import Column, Fact, Page, PageTable, Section, present, words
from brim.reporting.charts import Axis, Chart, bar_chart, limit_line
from brim.reporting.theme import series_for
from brim.settings.sizes import format_bytes
from brim.units import bytes_text, count_text, short_name

__all__ = ["forecast_page"]

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
        subtitle=f"{first['mode']}, traced in {max(d['trace_seconds'] for d in documents):.1f} s without a GPU",
        headline=_headline(documents),
        facts=tuple(
            Fact(f"largest batch on {one['gpu']['key']}", count_text(one["batch_size_max"])) for one in documents
        ),
        remarks=tuple(dict.fromkeys(note for document in documents for note in document["notes"])),
        warnings=tuple(dict.fromkeys(f"Approximate: {d['approximate']}" for d in documents if d["approximate"])),
        sections=tuple(_section(document) for document in documents),
    )


def _headline(documents: Sequence[Document]) -> str:
    answers = [
        f"{one['batch_size_max']:,} on {one['gpu']['name']}"
        if one["batch_size_max"]
        else f"none on {one['gpu']['name']}"
        for one in documents
    ]
    return f"Largest batch size that fits: {', '.join(answers)}"


def _section(document: Document) -> Section:
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
        title=card["name"],
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
