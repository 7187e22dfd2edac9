"""A forecast as a page: memory over batch size, stacked by what it is for, under the line of what the card has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.cli.forecast import PART_NAMES, sizes_of
from brim.reporting.base import Column, Fact, Key, Page, Panel, Section, Spec, Table
from brim.reporting.charts.theme import HEIGHT, LIMIT, series_colour
from brim.reporting.units import bytes_text, count_text
from brim.settings.sizes import format_bytes

__all__ = ["forecast_page"]

GIB = 2**30
# Ten parts are too many to tell apart: what stays whatever the batch, what grows with it, what is not torch's own.
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
        title=f"Forecast: {first['model']}",
        subtitle=f"{first['mode']}, traced in {max(d['trace_seconds'] for d in documents):.1f} s without a GPU",
        headline=_headline(documents),
        facts=tuple(
            Fact(name=f"largest batch on {one['gpu']['key']}", value=count_text(one["batch_size_max"]))
            for one in documents
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
    words = (
        f"{card['name']} has {format_bytes(card['memory_bytes'])}; {format_bytes(limit)} may be used "
        f"(margin {document['margin']:.0%}). Largest batch size that fits: {document['batch_size_max'] or 'none'}."
    )
    panel = Panel(
        title="Memory on the card (GiB)",
        spec=_spec(rows, limit),
        alternative=f"Memory by batch size, stacked by what it is for. {words}",
        keys=(
            *(Key(label=GROUP_NAMES[group], colour=series_colour(i), mark="bar") for i, group in enumerate(GROUPS)),
            Key(label="to use", colour=LIMIT, mark="dashed"),
        ),
    )
    parts = [part for part in PART_NAMES if any(row.get(part) for row in rows)]
    columns = (
        Column(title="batch size", field="batch_size", show=count_text),
        Column(title="fits", field="fits", words=True),
        Column(title="as nvidia-smi shows", field="device_bytes", show=bytes_text),
        Column(title="reserved", field="peak_reserved_bytes", show=bytes_text),
        Column(title="allocated", field="peak_allocated_bytes", show=bytes_text),
        *(Column(title=PART_NAMES[part], field=part, show=bytes_text) for part in parts),
    )
    return Section(
        title=card["name"],
        paragraphs=(words,),
        panels=(panel,),
        table=Table(caption="Every size forecast", columns=columns, rows=rows),
    )


def _row(size: Mapping[str, Any]) -> dict[str, Any]:
    return {**size, **size["breakdown"]}


def _spec(rows: Sequence[Mapping[str, Any]], limit_bytes: int) -> Spec:
    """Stacked bars and a rule, as a Vega-Lite specification."""
    values = [
        {
            "size": str(row["batch_size"]),
            "part": GROUP_NAMES[group],
            "order": place,
            "gib": sum(row.get(part, 0) for part in parts) / GIB,
            "shown": format_bytes(sum(row.get(part, 0) for part in parts)),
        }
        for row in rows
        for place, (group, parts) in enumerate(GROUPS.items())
    ]
    names = list(GROUP_NAMES.values())
    bars = {
        "data": {"values": values},
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "size",
                "type": "ordinal",
                "sort": [str(row["batch_size"]) for row in rows],
                "title": "batch size",
                "axis": {"labelAngle": 0, "labelOverlap": "greedy"},
            },
            "y": {"field": "gib", "type": "quantitative", "title": None, "stack": "zero"},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": names, "range": [series_colour(place) for place in range(len(names))]},
                "legend": None,
            },
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "size", "type": "nominal", "title": "batch size"},
                {"field": "part", "type": "nominal", "title": "part"},
                {"field": "shown", "type": "nominal", "title": "memory"},
            ],
        },
    }
    rule = {
        "data": {"values": [{"limit": limit_bytes / GIB}]},
        "mark": {"type": "rule", "strokeDash": [6, 3], "color": LIMIT},
        "encoding": {"y": {"field": "limit", "type": "quantitative"}},
    }
    return {"layer": [bars, rule], "width": "container", "height": HEIGHT}
