"""The page of a kind of run that has none of its own yet: its summary and plan as tables."""

from __future__ import annotations

from brim.reporting.base import Column, Page, Section, Table
from brim.reporting.read import Run
from brim.reporting.sections.machine import machine_section
from brim.reporting.sections.settings import flat_rows, settings_sections
from brim.reporting.units import duration_text, text

__all__ = ["other_page"]

_NAMED = (Column(title="figure", field="name", words=True), Column(title="value", field="value", words=True))


def other_page(run: Run) -> Page:
    """Everything that the run says of itself."""
    tables = (("Summary", run.summary), ("Plan", run.plan))
    sections = [
        Section(title=title, table=Table(caption=title, columns=_NAMED, rows=flat_rows(document)), table_open=True)
        for title, document in tables
        if document
    ]
    trace = run.trace()
    if trace:
        sections.append(machine_section([("", trace)], limit_bytes=None))
    return Page(
        title=f"{run.kind.capitalize()} of {text(run.request.get('model'))}",
        subtitle=f"took {duration_text(run.document.get('duration_seconds'))}",
        sections=(*sections, *settings_sections(run)),
    )
