"""The page of a sweep: the best experiment, what it cost, which sizes were given and used, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.front import draw_fronts
from brim.reporting.charts.theme import LIMIT, Line, lines_for, series_colour
from brim.reporting.charts.trend import draw_trend
from brim.reporting.kinds.other import other_page
from brim.reporting.read import Run
from brim.reporting.rows.points import KnobAxis
from brim.reporting.rows.sweep import against_rows, experiment_rows, mapping_of, size_rows, varied_settings
from brim.reporting.sections.settings import settings_sections
from brim.reporting.units import (
    byte_unit,
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    number,
    score_text,
    significant,
    text,
)
from brim.reporting.wording import listed
from brim.storage.files import read_json

__all__ = ["sweep_page"]

MOST_DRAWN = 60  # experiments whose sizes are drawn one by one


def sweep_page(run: Run) -> Page:
    """Headline, table, score against cost, sizes, failures, settings; without sweep.json what run.json has."""
    document: Any = read_json(run.folder / "sweep.json")
    if not isinstance(document, dict) or not isinstance(document.get("experiments"), list):
        return other_page(run)
    rows = experiment_rows(document)
    metric = mapping_of(document, "metric")
    name, higher = str(metric.get("name") or "score"), bool(metric.get("higher_is_better", True))
    done = [row for row in rows if row["state"] == "completed"]
    failed = [row for row in rows if row["state"] == "failed"]
    pairing = mapping_of(document, "pairing")
    sections = [
        _table_section(run, rows, name),
        *_against_sections(rows, name, higher),
        *_size_sections(rows),
        _saved_section(document, pairing),
        *_failure_sections(failed),
        *settings_sections(run),
    ]
    return Page(
        title=f"Sweep of {text(run.request.get('file'))}",
        subtitle=f"{plural(len(rows), 'experiment')} in {duration_text(run.document.get('duration_seconds'))}",
        headline=_headline(rows, name),
        facts=_facts(document, rows, name),
        warnings=tuple(f"{row['id']}: {_first(row['error'])}" for row in failed[:5])
        + ((f"and {plural(len(failed) - 5, 'experiment')} more failed",) if len(failed) > 5 else ())
        + (("the sweep was interrupted: go on with --resume",) if document.get("state") == "interrupted" else ()),
        remarks=(_completed(len(done), len(rows), number(mapping_of(document, "time_saved").get("experiments"))),),
        sections=tuple(sections),
    )


def _completed(done: int, chosen: int, whole: float | None) -> str:
    """How many were completed of those that were to run, and how many the grid has where that is more."""
    more = f"; the grid has {int(whole):,}" if whole and whole > chosen else ""
    return f"{done} of {plural(chosen, 'experiment')} completed{more}."


def _headline(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    best = next((row for row in rows if row["score"] is not None), None)
    if best is None:
        return "No experiment has a result"
    score, tied = score_text(best["score"]), _sharing_the_best(rows)
    if tied > 1:
        return f"{plural(tied, 'experiment')} share the best {metric}, {score}"
    return f"Best: {best['model']} at batch size {count_text(best['batch_size_used'])}, {metric} {score}"


def _sharing_the_best(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many experiments have the score of the first, as it is shown."""
    shown = [score_text(row["score"]) for row in rows if row["score"] is not None]
    return shown.count(shown[0]) if shown else 0


def _facts(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[Fact, ...]:
    best = next((row for row in rows if row["score"] is not None), None)
    found = []
    if best is not None and _sharing_the_best(rows) == 1:
        found.append(Fact(name=f"best {metric}", value=score_text(best["score"]), note=best["model"]))
        found.append(Fact(name="throughput", value=f"{significant(best['samples_per_second'])} samples/s"))
        if number(best["peak_reserved_bytes"]) is not None:
            found.append(Fact(name="reserved memory", value=bytes_text(best["peak_reserved_bytes"])))
    saved = mapping_of(document, "time_saved")
    full = number(saved.get("experiments_full_product"))
    if full and full > (number(saved.get("experiments")) or full):
        value = f"{count_text(saved.get('experiments'))} instead of {count_text(full)}"
        found.append(Fact(name="the paired grid", value=value, note=f"{fraction_text(saved.get('fraction'))} saved"))
    return tuple(found)


def _table_section(run: Run, rows: Sequence[Mapping[str, Any]], metric: str) -> Section:
    shown = []
    for row in rows:
        place = run.inside(row.get("folder"))
        own = place is not None and (place / "report.html").exists()
        shown.append({**row, "report": quote(f"{row['folder']}/report.html") if own else None})
    varied = [Column(title=key, field=f"setting {key}") for key in varied_settings(rows)]
    columns = (
        Column(title="experiment", field="id", words=True, link="report"),
        Column(title="model", field="model", words=True),
        *varied,
        Column(title=f"best {metric}", field="score", show=score_text),
        Column(title=f"last {metric}", field="final", show=score_text),
        Column(title="epochs", field="epochs", show=count_text),
        Column(title="batch size", field="batch_size_used", show=count_text),
        Column(title="samples/s", field="samples_per_second", show=significant),
        Column(title="reserved", field="peak_reserved_bytes", show=bytes_text),
        Column(title="duration", field="seconds", show=duration_text),
        Column(title="state", field="state", words=True),
    )
    table = Table(caption=f"Experiments by {metric}", columns=columns, rows=shown).known()
    return Section(title="Experiments", table=table, table_open=True)


def _against_sections(rows: Sequence[Mapping[str, Any]], metric: str, higher: bool) -> list[Section]:
    """The score against time and memory, a colour for each model."""
    unit = byte_unit(row["peak_reserved_bytes"] for row in rows)
    costs = (("seconds", "duration (s)", 1.0), ("peak_reserved_bytes", f"peak reserved ({unit.name})", unit.size))
    lines = lines_for(list(dict.fromkeys(row["model"] for row in rows)))
    panels, tabled = [], []
    for field, title, size in costs:
        drawn = against_rows(rows, field, divide_by=size, higher_is_better=higher)
        for row in drawn:
            row |= {"low": None, "high": None, "shown": score_text(row["y"]), "cost_shown": significant(row["cost"])}
        if not drawn:
            continue
        best = max(drawn, key=lambda row: row["y"] if higher else -row["y"])
        words = f"{metric} against {title}: the best is {best['label']} with {best['shown']} at {best['cost_shown']}"
        spec = draw_fronts(drawn, lines=lines, x_title=title, y_title=metric, what="experiment")
        panels.append(
            Panel(
                title=f"{metric} against {title}", spec=spec, alternative=words, keys=tuple(one.key() for one in lines)
            )
        )
        tabled += [{"what": title, **row} for row in drawn]
    if not panels:
        return []
    columns = (
        Column(title="experiment", field="label", words=True),
        Column(title="model", field="line", words=True),
        Column(title=metric, field="shown"),
        Column(title="cost", field="cost_shown"),
        Column(title="of", field="what", words=True),
    )
    table = Table(caption=f"{metric} and its cost", columns=columns, rows=tabled)
    return [Section(title="Score against time and memory", panels=tuple(panels), table=table)]


def _size_sections(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Batch sizes given, forecast and used."""
    columns = (
        Column(title="experiment", field="id", words=True),
        Column(title="given", field="asked"),
        Column(title="forecast", field="planned", show=count_text),
        Column(title="used", field="batch_size_used", show=count_text),
        Column(title="how it came about", field="batch_size_reason", words=True),
        Column(title="OOM events", field="oom_events", show=count_text),
        Column(title="forecast memory", field="forecast_bytes", show=bytes_text),
        Column(title="reserved", field="peak_reserved_bytes", show=bytes_text),
    )
    table = Table(caption="Batch sizes", columns=columns, rows=rows).known()
    sizes = size_rows(rows)
    if not any(row["y"] for row in sizes) or len(rows) > MOST_DRAWN:
        return [Section(title="Batch sizes", table=table, table_open=True)]
    styles = (
        Line(label="given", colour=LIMIT, shape="square", dash=(6, 4)),
        Line(label="forecast", colour=series_colour(1), shape="triangle-up", dash=(2, 3)),
        Line(label="used", colour=series_colour(0)),
    )
    lines = [line for line in styles if any(row["line"] == line.label and row["y"] for row in sizes)]
    drawn = [{**row, "shown": count_text(row["y"])} for row in sizes if row["y"]]
    axis = KnobAxis(title="experiment", scale="words", values=tuple(row["id"] for row in rows))
    spec = draw_trend(drawn, axis=axis, lines=lines, title="samples", sizes=True)
    changed = [row["id"] for row in rows if number(row["asked"]) and row["batch_size_used"] not in (None, row["asked"])]
    words = f"used another size than was given: {listed(changed)}" if changed else "each used the size it was given"
    keys = tuple(line.key() for line in lines)
    panel = Panel(
        title="Batch size (samples)", spec=spec, alternative=f"Batch sizes of {len(rows)}: {words}", keys=keys
    )
    return [Section(title="Batch sizes", panels=(panel,), table=table)]


def _saved_section(document: Mapping[str, Any], pairing: Mapping[str, Any]) -> Section:
    saved = mapping_of(document, "time_saved")
    full, count = number(saved.get("experiments_full_product")), number(saved.get("experiments"))
    lines = [f"Pairing: {text(pairing.get('mode'))}. {text(pairing.get('reason'))}"]
    if full and count and full > count:
        lines.append(
            f"The grid has {count_text(count)} experiments instead of the {count_text(full)} of every list crossed: "
            f"{fraction_text(saved.get('fraction'))} less, about {duration_text(saved.get('seconds_saved_estimate'))} "
            "at the mean time of one."
        )
    return Section(title="How experiments were paired", paragraphs=tuple(lines))


def _failure_sections(failed: Sequence[Mapping[str, Any]]) -> list[Section]:
    if not failed:
        return []
    columns = (
        Column(title="experiment", field="id", words=True),
        Column(title="failure", field="failure", words=True),
        Column(title="why", field="error", words=True),
        Column(title="attempts", field="attempts", show=count_text),
    )
    table = Table(caption="Experiments that failed", columns=columns, rows=failed)
    return [Section(title="Failures", table=table, table_open=True)]


def _first(error: object) -> str:
    lines = str(error or "").strip().splitlines()
    return lines[0] if lines else "failed"
