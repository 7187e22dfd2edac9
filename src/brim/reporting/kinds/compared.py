"""What every comparison has: runs with labels that tell them apart, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brim.advice.run_reader import Run, data_keys, value_at
from brim.reporting.base import PageTable, Section, run_columns, words
from brim.reporting.repeat import flat_rows
from brim.units import date_text, duration_text, text

__all__ = [
    "DataNote", "by_place", "comparison_document", "difference_section", "header_of", "labels_of", "note_on_data",
    "trained_on",
]  # fmt: skip

COMPARISON_SCHEMA = "brim.comparison/1"

_UNEQUAL_ALWAYS = ("argv", "output", "resume")


class DataNote(NamedTuple):
    """Which runs were made on other data than the first, and the warning about it; no warning where none was."""

    differs: tuple[bool, ...]  # of each run
    warnings: tuple[str, ...]


def comparison_document(compared: Sequence[Run], data: DataNote, **parts: Any) -> dict[str, Any]:
    """The document of a comparison: what all have around `parts`."""
    return {
        "schema": COMPARISON_SCHEMA,
        "kind": compared[0].kind,
        "data_differs": any(data.differs),
        "warnings": list(data.warnings),
        **parts,
        "settings_that_differ": _differing_rows(compared),
    }


def note_on_data(runs: Sequence[Run], labels: Sequence[str]) -> DataNote:
    """Whether the runs saw the same data: by its content where every run recorded that, else by what was asked for."""
    keys = data_keys(runs)
    differs = tuple(key != keys[0] for key in keys)
    if not any(differs):
        return DataNote(differs, ())
    named = [text(_data_name(run)) for run in runs]
    said = ", ".join(f"{label}: {name}" for label, name in zip(labels, named, strict=True))
    how = "other content under the same name" if len(set(named)) == 1 else said
    return DataNote(
        differs,
        (f"The runs were made on different data ({how}): how they differ is not judged, since the data may be why.",),
    )


def _data_name(run: Run) -> object:
    if isinstance(run.request.get("settings"), dict):
        return trained_on(run)[1]
    data = run.request.get("data")
    return ", ".join(map(str, data)) if isinstance(data, list) else data


def trained_on(run: Run) -> tuple[str, str]:
    """What was trained, and on what."""
    kind = value_at(run.request, "settings.data.type")
    named = value_at(run.request, "settings.data.root") or (kind if kind not in (None, "auto") else "moving shapes")
    return str(value_at(run.request, "settings.model.type") or "a model"), str(named)


def labels_of(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    paths = [folder.resolve() for folder in folders]
    for parts in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = [Path(*path.parts[-parts:]).as_posix() for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def header_of(run: Run, label: str) -> dict[str, Any]:
    """What is said of each run."""
    return {
        "label": label, "folder": str(run.folder), "model": run.request.get("model"), "data": run.request.get("data"),
        "started_at": run.document.get("started_at"), "duration_seconds": run.document.get("duration_seconds"),
    }  # fmt: skip


def _differing_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Settings and switches that are not the same in all runs, with every run's value."""
    flat = []
    for run in runs:
        asked = flat_rows(run.request, leave_out=_UNEQUAL_ALWAYS)
        flat.append({row["name"]: row["value"] for row in [*asked, *flat_rows(run.environment)]})
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [{"name": name, "values": [one.get(name) for one in flat]} for name in names]
    return [row for row in rows if len(set(row["values"])) > 1]


def by_place(values: Sequence[Any]) -> dict[str, Any]:
    """The values of several runs as the fields `0`, `1`, …"""
    return {str(place): value for place, value in enumerate(values)}


def difference_section(document: Mapping[str, Any]) -> Section:
    """Who is compared, and what was not the same."""
    runs = document["runs"]
    rows: list[dict[str, Any]] = [
        {"name": "folder", **by_place([run["folder"] for run in runs])},
        {"name": "started", **by_place([date_text(run["started_at"]) for run in runs])},
        {"name": "took", **by_place([duration_text(run["duration_seconds"]) for run in runs])},
    ]
    rows += [{"name": row["name"], **by_place(row["values"])} for row in document["settings_that_differ"]]
    said = () if document["settings_that_differ"] else ("All settings and versions are the same.",)
    columns = run_columns([run["label"] for run in runs], _as_it_is, words=True)
    table = PageTable("The runs, and the settings in which they differ", (words("setting", "name"), *columns), rows)
    return Section(title="What differs", paragraphs=said, table=table)


def _as_it_is(value: Any) -> str:
    return "not set" if value is None else str(value)
