"""The page of a sweep: the best experiment, what it cost, which sizes were given and used, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping, value_at
from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, PageTable, RunKind, Section, facts, present, words
from brim.reporting.charts import Axis, front_chart, line_chart
from brim.reporting.kinds.search import other_page
from brim.reporting.repeat import repeat_sections
from brim.reporting.theme import LIMIT, Series, series_colour, series_for
from brim.settings.nested_keys import flatten
from brim.storage.files import read_json
from brim.units import (
    byte_unit,
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    listed,
    number,
    score_text,
    short_name,
    significant,
    text,
)

__all__ = ["SWEEP", "against_rows", "sweep_page"]

MOST_DRAWN = 60  # experiments whose sizes are drawn one by one
MOST_WARNINGS = 5
_OF_THE_RESULT = (
    "state", "failure", "error", "seconds", "epochs", "best_epoch", "samples_per_second", "batch_size_used",
    "batch_size_reason", "oom_events", "peak_reserved_bytes", "peak_allocated_bytes", "attempts", "device", "folder",
)  # fmt: skip
_SIZES = {
    "asked": Series(label="given", colour=LIMIT, shape="square", dash=(6, 4)),
    "planned": Series(label="forecast", colour=series_colour(1), shape="triangle-up", dash=(2, 3)),
    "batch_size_used": Series(label="used", colour=series_colour(0)),
}
SIZE_COLUMNS = (
    words("experiment", "id"),
    Column("given", "asked"),
    Column("forecast", "planned", count_text),
    Column("used", "batch_size_used", count_text),
    words("how it was chosen", "batch_size_reason"),
    Column("OOM events", "oom_events", count_text),
    Column("forecast memory", "forecast_bytes", bytes_text),
    Column("reserved", "peak_reserved_bytes", bytes_text),
)
FAILURE_COLUMNS = (
    words("experiment", "id"), words("failure"), words("why", "error"), Column("attempts", "attempts", count_text),
)  # fmt: skip


def sweep_page(run: Run) -> Page:
    """Headline, table, score against cost, sizes, failures, settings; without sweep.json what run.json has."""
    document: Any = read_json(run.folder / "sweep.json")
    if not isinstance(document, dict) or not isinstance(document.get("experiments"), list):
        return other_page(run)
    rows = _experiment_rows(document)
    metric, higher = value_at(document, "metric.name"), value_at(document, "metric.higher_is_better")
    name = str(metric or "score")
    failed = [row for row in rows if row["state"] == "failed"]
    done = sum(row["state"] == "completed" for row in rows)
    whole = number(value_at(document, "time_saved.experiments"))
    more = f"; the grid has {int(whole):,}" if whole and whole > len(rows) else ""
    return Page(
        title=f"Sweep of {short_name(run.request.get('file'))}",
        subtitle=f"{plural(len(rows), 'experiment')} in {run.duration}",
        headline=_headline(rows, name),
        facts=_facts(document, rows, name),
        warnings=_warnings(document, failed),
        remarks=(f"{done} of {plural(len(rows), 'experiment')} completed{more}.",),
        sections=present(
            _experiment_section(run, rows, name),
            _cost_section(rows, name, higher=higher is None or bool(higher)),
            _size_section(rows),
            _pairing_section(document),
            Section(title="Failures", table=PageTable("Experiments that failed", FAILURE_COLUMNS, failed))
            if failed
            else None,
            *repeat_sections(run),
        ),
    )


def _experiment_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for every experiment: settings, forecast and result side by side; those with the metric first, by it."""
    name = str(value_at(document, "metric.name") or "")
    ranking = document.get("ranking")
    places = {one: place for place, one in enumerate(ranking if isinstance(ranking, list) else [])}
    rows = []
    for entry in entries(document.get("experiments")):
        settings = flatten(mapping(entry.get("settings")))
        result = mapping(entry.get("result"))
        rows.append(
            {
                **{f"setting {key}": value for key, value in settings.items()},
                **{key: result.get(key) for key in _OF_THE_RESULT},
                "id": str(entry.get("id")), "model": str(settings.get("model.type", "—")),
                "asked": settings.get("hp.batch_size", "auto"),
                "planned": number(value_at(entry, "forecast.batch_size")),
                "forecast_bytes": number(value_at(entry, "forecast.peak_reserved_bytes")),
                "score": number(mapping(result.get("best")).get(name)),
                "final": number(mapping(result.get("final")).get(name)),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: places.get(row["id"], len(places)))


def _sharing_the_best(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many experiments have the score of the first, as it is shown."""
    shown = [score_text(row["score"]) for row in rows if row["score"] is not None]
    return shown.count(shown[0]) if shown else 0


def _headline(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    best = next((row for row in rows if row["score"] is not None), None)
    if best is None:
        return "No experiment has a result"
    score, tied = score_text(best["score"]), _sharing_the_best(rows)
    if tied > 1:
        return f"{plural(tied, 'experiment')} share the best {metric}, {score}"
    return f"Best: {best['model']} at batch size {count_text(best['batch_size_used'])}, {metric} {score}"


def _facts(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[Fact, ...]:
    best = next((row for row in rows if row["score"] is not None), {}) if _sharing_the_best(rows) == 1 else {}
    saved = mapping(document.get("time_saved"))
    full, count = number(saved.get("experiments_full_product")), number(saved.get("experiments"))
    less = f"{fraction_text(saved.get('fraction'))} saved"
    return facts(
        Fact(f"best {metric}", score_text(best.get("score")), best.get("model", "")),
        Fact("throughput", f"{significant(best.get('samples_per_second'))} samples/s"),
        Fact("reserved memory", bytes_text(best.get("peak_reserved_bytes"))),
        Fact("the paired grid", f"{count_text(count)} instead of {count_text(full)}", less)
        if full and count and full > count
        else None,
    )


def _warnings(document: Mapping[str, Any], failed: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    reasons = [next(iter(str(row["error"] or "").strip().splitlines()), "failed") for row in failed]
    more = len(failed) - MOST_WARNINGS
    return present(
        *(f"{row['id']}: {why}" for row, why in list(zip(failed, reasons, strict=True))[:MOST_WARNINGS]),
        f"and {plural(more, 'experiment')} more failed" if more > 0 else None,
        "the sweep was interrupted: continue with --resume" if document.get("state") == "interrupted" else None,
    )


def _experiment_section(run: Run, rows: Sequence[Mapping[str, Any]], metric: str) -> Section:
    own = ("setting model.type", "setting hp.batch_size")  # which have columns of their own
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("setting ") and key not in own)
    varied = [key for key in keys if len({str(row.get(key)) for row in rows}) > 1]
    columns = (
        words("experiment", "id", link="report"),
        words("model"),
        *(Column(key.removeprefix("setting "), key) for key in varied),
        Column(f"best {metric}", "score", score_text),
        Column(f"last {metric}", "final", score_text),
        Column("epochs", "epochs", count_text),
        Column("batch size", "batch_size_used", count_text),
        Column("samples/s", "samples_per_second", significant),
        Column("reserved", "peak_reserved_bytes", bytes_text),
        Column("duration", "seconds", duration_text),
        words("state"),
    )
    shown = [{**row, "report": run.report_of(row.get("folder"))} for row in rows]
    return Section(title="Experiments", table=PageTable(f"Experiments by {metric}", columns, shown))


def against_rows(
    rows: Sequence[Mapping[str, Any]], cost: str, *, divide_by: float, higher_is_better: bool
) -> list[dict[str, Any]]:
    """The score against what it cost, with whether any experiment of the same model is as good for less."""
    drawn = [
        {"line": row["model"], "label": row["id"], "short": row["id"], "y": row["score"], "x": known / divide_by,
         "shown": score_text(row["score"]), "cost_shown": significant(known / divide_by)}
        for row in rows
        if row["score"] is not None and (known := number(row.get(cost))) is not None
    ]  # fmt: skip
    sign = 1 if higher_is_better else -1
    for row in drawn:
        rivals = [other for other in drawn if other["line"] == row["line"] and other is not row]
        row["front"] = not any(
            other["x"] <= row["x"]
            and sign * other["y"] >= sign * row["y"]
            and (other["x"], other["y"]) != (row["x"], row["y"])
            for other in rivals
        )
    return sorted(drawn, key=lambda row: row["x"])


def _cost_section(rows: Sequence[Mapping[str, Any]], metric: str, *, higher: bool) -> Section | None:
    """The score against time and memory, a colour for each model."""
    unit = byte_unit(row["peak_reserved_bytes"] for row in rows)
    costs = (("seconds", "duration (s)", 1.0), ("peak_reserved_bytes", f"peak reserved ({unit.name})", unit.size))
    series = series_for(list(dict.fromkeys(row["model"] for row in rows)))
    charts, tabled = [], []
    for field, title, size in costs:
        drawn = against_rows(rows, field, divide_by=size, higher_is_better=higher)
        best = (max if higher else min)(drawn, key=lambda row: row["y"], default=None)
        said = f": the best is {best['label']} with {best['shown']} at {best['cost_shown']}" if best else ""
        charts.append(
            front_chart(
                f"{metric} against {title}", drawn, x=Axis(title, "knob"), figure=metric, what="experiment",
                caption=f"{metric} against {title}{said}.", series=series,
            )
        )  # fmt: skip
        tabled += [{"what": title, **row} for row in drawn]
    columns = (
        words("experiment", "label"), words("model", "line"), Column(metric, "shown"), Column("cost", "cost_shown"),
        words("of", "what"),
    )  # fmt: skip
    if not tabled:
        return None
    table = PageTable(f"{metric} and its cost", columns, tabled)
    return Section(title="Score against time and memory", charts=present(*charts), table=table)


def _size_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """Batch sizes given, forecast and used; an experiment that asked for auto was given none."""
    drawn = [
        {"x": row["id"], "label": row["id"], "line": series.label, "y": size, "shown": count_text(size)}
        for field, series in _SIZES.items()
        for row in rows
        if (size := number(row[field]))
    ]
    changed = [row["id"] for row in rows if number(row["asked"]) and row["batch_size_used"] not in (None, row["asked"])]
    given = [row for row in rows if number(row["asked"])]
    kept = "each used the size it was given" if given else "none was given, each was found"
    said = f"used another size than was given: {listed(changed)}" if changed else kept
    axis = Axis("experiment", "words", tuple(row["id"] for row in rows))
    chart = line_chart(
        "Batch size (samples)", drawn if len(rows) <= MOST_DRAWN else [], x=axis, y=Axis("samples", "sizes"),
        series=list(_SIZES.values()), caption=f"Batch sizes of {len(rows)}: {said}.",
    )  # fmt: skip
    return Section(title="Batch sizes", charts=present(chart), table=PageTable("Batch sizes", SIZE_COLUMNS, rows))


def _pairing_section(document: Mapping[str, Any]) -> Section:
    saved, pairing = mapping(document.get("time_saved")), mapping(document.get("pairing"))
    full, count = number(saved.get("experiments_full_product")), number(saved.get("experiments"))
    less = (
        f"The grid has {count_text(count)} experiments instead of the {count_text(full)} of every list crossed: "
        f"{fraction_text(saved.get('fraction'))} less, about {duration_text(saved.get('seconds_saved_estimate'))} "
        "at the mean time of one."
    )
    said = present(
        f"Pairing: {text(pairing.get('mode'))}. {text(pairing.get('reason'))}",
        less if full and count and full > count else None,
    )
    return Section(title="How experiments were paired", paragraphs=said)


SWEEP = RunKind(name="sweep", page=sweep_page)
