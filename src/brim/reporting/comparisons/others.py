"""Runs of a kind without a comparison of its own: their summaries and plans side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Page, Section, Table
from brim.reporting.comparisons.base import (
    COMPARISON_SCHEMA,
    differing_rows,
    header_of,
    labels_of,
    note_on_data,
    run_columns,
    settings_section,
)
from brim.reporting.read import Run
from brim.reporting.sections.settings import flat_rows
from brim.reporting.units import text

__all__ = ["compare_others", "others_page"]

_OF_THE_PLAN = ("unit", "size", "batch_size_max", "batch_size_max_estimate", "objective", "reason", "device", "memory")


def compare_others(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as a document: every figure of the summaries and plans, by run."""
    labels = labels_of([run.folder for run in runs])
    flat = []
    for run in runs:
        plan = {name: run.plan[name] for name in _OF_THE_PLAN if name in run.plan}
        rows = [*flat_rows(run.summary), *flat_rows({"plan": plan})]
        flat.append({row["name"]: row["value"] for row in rows})
    names = list(dict.fromkeys(name for one in flat for name in one))
    return {
        "schema": COMPARISON_SCHEMA,
        "kind": runs[0].kind,
        **note_on_data(runs, labels).to_json(),
        "runs": [header_of(run, label) for run, label in zip(runs, labels, strict=True)],
        "figures": [{"name": name, "values": [one.get(name) for one in flat]} for name in names],
        "settings_that_differ": differing_rows(runs),
        "notes": [],
    }


def others_page(document: Mapping[str, Any]) -> Page:
    """One table of figures, one of settings."""
    rows = [
        {"name": row["name"], **{str(place): value for place, value in enumerate(row["values"])}}
        for row in document["figures"]
    ]
    columns = (Column(title="figure", field="name", words=True), *run_columns(document, text, words=True))
    figures = Table(caption="Figures of each run", columns=columns, rows=rows)
    return Page(
        title=f"{plural(len(document['runs']), 'run')} compared ({document['kind']})",
        subtitle=" · ".join(run["label"] for run in document["runs"]),
        warnings=tuple(document["warnings"]),
        sections=(Section(title="Figures", table=figures, table_open=True), settings_section(document)),
    )
