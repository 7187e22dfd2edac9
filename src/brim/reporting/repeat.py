"""How to repeat a run: the command, what was asked, and under which versions and switches it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brim.advice.run_reader import Run
from brim.advice.run_requests import command_of
from brim.reporting.base import PageTable, Section, present, words
from brim.units import date_text, text

__all__ = ["flat_rows", "repeat_sections"]


def repeat_sections(run: Run, *, command: str = "", source: str = "") -> tuple[Section, ...]:
    """The command, the settings, the environment; a run that has another command than its request says gives it."""
    document = run.document
    took = (
        f"Started {date_text(document.get('started_at'))}, ended {date_text(document.get('ended_at'))}, "
        f"took {run.duration}."
    )
    typed = isinstance(run.request.get("argv"), list)
    made = (
        "The command, as it was typed:" if typed else "The command, put together from the settings that the run kept:"
    )
    named = (words("setting", "name"), words("value"))
    asked = flat_rows(run.request, leave_out=("argv",))
    versions = PageTable("Versions and switches", named, flat_rows(run.environment))
    return present(
        Section(
            title="How to repeat it",
            paragraphs=(took, source or made),
            command=command or command_of(run.request, kind=run.kind),
            table=PageTable("Settings", named, asked) if asked else None,
            open=False,
        ),
        Section(title="Environment", table=versions) if versions.rows else None,
    )


def flat_rows(document: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Name and value of all that is set, in the document's order; what is inside a mapping is named by its path."""
    rows: list[dict[str, str]] = []
    for name, value in document.items():
        if name in leave_out or value is None or value in ("", [], {}):
            continue
        if isinstance(value, dict):
            rows += [{"name": f"{name}.{row['name']}", "value": row["value"]} for row in flat_rows(value)]
        elif isinstance(value, list):
            rows.append({"name": name, "value": ", ".join(text(one) for one in value)})
        else:
            rows.append({"name": name, "value": text(value)})
    return rows
