"""Trainings side by side, old and new settings: loss against samples and against time, figures, sizes, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.curves import curve_key, draw_curves
from brim.reporting.charts.timeline import time_unit
from brim.reporting.comparisons.base import (
    COMPARISON_SCHEMA,
    differing_rows,
    header_of,
    labels_of,
    lines_of,
    note_on_data,
    run_columns,
    settings_section,
)
from brim.reporting.kinds.training import spread_text
from brim.reporting.read import Run
from brim.reporting.rows.preference import METRICS, method_rows
from brim.reporting.rows.training import figure_names, samples_to_reach, seed_rows, smoothed
from brim.reporting.training_run import TrainingRun, is_preference, read_training, subject_of
from brim.reporting.units import (
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    number,
    ratio_text,
    signed_text,
    significant,
    text,
)
from brim.reporting.wording import trend_words

__all__ = ["compare_trainings", "trainings_page"]

UNMEASURED = "not run"

_FIGURES: dict[str, tuple[str, Callable[[object], str]]] = {
    "effective_batch_size": ("effective batch", count_text),
    "micro_batch_size": ("micro-batch", count_text),
    "accumulation_steps": ("micro-batches in a step", count_text),
    "samples_per_second": ("throughput (samples/s)", significant),
    "pairs_per_second": ("throughput (pairs/s)", significant),
    "samples": ("samples seen", count_text),
    "steps": ("optimizer steps", count_text),
    "seconds": ("time", duration_text),
    "peak_allocated_bytes": ("peak allocated", bytes_text),
    "peak_reserved_bytes": ("peak reserved", bytes_text),
    "oom_events": ("OOM events", count_text),
    "gpu_utilisation_mean": ("GPU use (mean)", fraction_text),
    "useful_batch": ("batch beyond which samples stop helping", count_text),
}


def compare_trainings(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as a document: every run's curves, figures and metrics; the first is what others are held to."""
    labels = labels_of([run.folder for run in runs])
    trainings = [None if is_preference(run) else read_training(run) for run in runs]
    described = [_described(run, label, training) for run, label, training in zip(runs, labels, trainings, strict=True)]
    data = note_on_data(runs, labels)
    reached = described[0]["final_loss"]
    for entry, training in zip(described, trainings, strict=True):
        entry["samples_to_first_s_loss"] = None if training is None else samples_to_reach(training.steps.spans, reached)
    return {
        "schema": COMPARISON_SCHEMA,
        "kind": "train",
        **data.to_json(),
        "runs": described,
        "methods": _methods(runs),
        "settings_that_differ": differing_rows(runs),
        "notes": _notes(described, trainings),
    }


def _described(run: Run, label: str, training: TrainingRun | None) -> dict[str, Any]:
    noise = run.summary.get("noise_scale")
    known = {**run.summary, "useful_batch": noise.get("useful_batch") if isinstance(noise, dict) else None}
    figures = {name: number(known.get(name)) for name in _FIGURES}
    metrics = {
        row["name"]: {"mean": row["mean"], "deviation": row["deviation"], "values": row["values"]}
        for row in seed_rows(run.summary.get("metrics"), [])
    }
    model, data = ("preference training", None) if training is None else subject_of(run)
    entry = {**header_of(run, label), "model": model, "data": data, "metrics": metrics, **figures}
    entry |= {"curve": [], "validation": [], "final_loss": None}
    if training is None:
        return entry
    curve, seconds = [], 0.0
    for span, mean in smoothed(training.steps.spans):
        seconds += span.seconds
        curve.append({"samples": span.samples, "seconds": seconds, "loss": mean})
    names = {"val_loss": "loss", **figure_names(training.epochs)}
    validation = [
        {"samples": row["samples"], **{title: row[name] for name, title in names.items() if row.get(name) is not None}}
        for row in training.epochs
        if row.get("samples") is not None
    ]
    return entry | {"curve": curve, "validation": validation, "final_loss": curve[-1]["loss"] if curve else None}


def _methods(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of preference trainings: every method, data set and encoder with each run's metrics."""
    by_run = [
        {(row["method"], row["data"], row["encoder"]): row for row in method_rows(run.summary.get("table"))}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for rows in by_run for key in rows))
    return [
        {
            **dict(zip(("method", "data", "encoder"), key, strict=True)),
            "values": [
                None
                if key not in rows
                else {name: {"mean": rows[key][name], "deviation": rows[key][f"{name} deviation"]} for name in METRICS}
                for rows in by_run
            ],
        }
        for key in keys
    ]


def _notes(described: Sequence[Mapping[str, Any]], trainings: Sequence[TrainingRun | None]) -> list[str]:
    notes = []
    kinds = {training is None for training in trainings}
    if len(kinds) > 1:
        notes.append("some are preference trainings and some are not: they have no curve and no metric in common")
    elif len({entry["model"] for entry in described}) > 1:
        said = ", ".join(f"{entry['label']}: {entry['model']}" for entry in described)
        notes.append(f"not the same model, so losses are of different models ({said})")
    for entry, training in zip(described, trainings, strict=True):
        if training is not None and not entry["curve"]:
            notes.append(f"{entry['label']} has no steps.jsonl, so it has no curve")
    return notes


def trainings_page(document: Mapping[str, Any]) -> Page:
    """Curves first, then metrics, sizes and speed, and the settings that differ."""
    runs = document["runs"]
    sections = [
        _loss_section(document),
        _validation_section(document),
        _metric_section(document),
        _method_section(document),
        _figure_section(document),
        settings_section(document),
    ]
    return Page(
        title=f"{plural(len(runs), 'training')} compared",
        subtitle=" · ".join(run["label"] for run in runs),
        headline=f"{runs[1]['label']} against {runs[0]['label']}",
        facts=_facts(runs[0], runs[1], same_data=not document["data_differs"]),
        warnings=(*document["warnings"], *document["notes"]),
        sections=tuple(section for section in sections if section is not None),
    )


def _facts(first: Mapping[str, Any], second: Mapping[str, Any], *, same_data: bool) -> tuple[Fact, ...]:
    """How the second differs from the first; figures of what was learnt only where both learnt from the same data."""
    facts = []
    for name, figure in second["metrics"].items():
        if same_data and name in first["metrics"] and name != "train_loss":
            before, after = first["metrics"][name]["mean"], figure["mean"]
            note = f"{significant(after)} against {significant(before)}"
            facts.append(Fact(name=name, value=signed_text(after - before), note=note))
    facts = facts[:3]
    rate = "samples_per_second"
    if first[rate] and second[rate]:
        faster = ratio_text(second[rate] / first[rate])
        facts.append(Fact(name="throughput", value=faster, note=f"{significant(second[rate])} samples/s"))
    if first["effective_batch_size"] and second["effective_batch_size"]:
        note = f"against {count_text(first['effective_batch_size'])}"
        facts.append(Fact(name="effective batch", value=count_text(second["effective_batch_size"]), note=note))
    reached, own = second["samples_to_first_s_loss"], first["samples_to_first_s_loss"]
    if same_data and reached and own:
        note = f"{count_text(reached)} against {count_text(own)}"
        facts.append(Fact(name="samples to the same loss", value=ratio_text(reached / own), note=note))
    return tuple(facts)


def _loss_section(document: Mapping[str, Any]) -> Section | None:
    """The training loss of all runs against samples, and against time."""
    runs = document["runs"]
    if not any(run["curve"] for run in runs):
        return None
    unit, size = time_unit(max((run["curve"][-1]["seconds"] for run in runs if run["curve"]), default=0.0))
    panels = (
        _curve_panel(document, "Training loss against samples", "samples", "samples seen", count_text, 1.0),
        _curve_panel(document, "Training loss against time", "seconds", f"time in steps ({unit})", duration_text, size),
    )
    rows = [
        {
            "name": run["label"],
            "final": run["final_loss"],
            "samples": run["samples_to_first_s_loss"],
            "all": run["curve"][-1]["samples"] if run["curve"] else None,
            "seconds": run["curve"][-1]["seconds"] if run["curve"] else None,
        }
        for run in runs
    ]
    columns = (
        Column(title="run", field="name", words=True),
        Column(title="last loss", field="final", show=significant),
        Column(title=f"samples to the last loss of {runs[0]['label']}", field="samples", show=_or_never),
        Column(title="samples", field="all", show=count_text),
        Column(title="time in steps", field="seconds", show=duration_text),
    )
    said = "Running means over a twentieth of each run, by the loss that each was trained with."
    table = Table(caption="Where each run came to", columns=columns, rows=rows)
    return Section(
        title="Loss of old and new settings", paragraphs=(said,), panels=panels, table=table, table_open=True
    )


def _or_never(value: object) -> str:
    return "not reached" if value is None else count_text(value)


def _curve_panel(
    document: Mapping[str, Any], title: str, field: str, x_title: str, show: Callable[[object], str], size: float
) -> Panel:
    lines = [line for line, run in zip(lines_of(document), document["runs"], strict=True) if run["curve"]]
    rows, words = [], []
    for run in document["runs"]:
        for point in run["curve"]:
            place = show(point[field])
            rows.append(
                {"x": point[field] / size, "y": point["loss"], "line": run["label"], "label": place,
                 "shown": significant(point["loss"])}
            )  # fmt: skip
        if run["curve"]:
            course = [(show(point[field]), point["loss"]) for point in run["curve"]]
            words.append(f"{run['label']} {trend_words(course, significant)}")
    dense = max(len(run["curve"]) for run in document["runs"])
    return Panel(
        title=title,
        spec=draw_curves(rows, lines=lines, x_title=x_title, title="loss"),
        alternative=f"{title}: {'; '.join(words)}.",
        keys=tuple(curve_key(line, points=dense <= 1) for line in lines),
    )


def _validation_section(document: Mapping[str, Any]) -> Section | None:
    """Every figure of validation that two runs or more have, against samples."""
    runs = document["runs"]
    counts: dict[str, int] = {}
    for run in runs:
        for name in dict.fromkeys(name for row in run["validation"] for name in row if name != "samples"):
            counts[name] = counts.get(name, 0) + 1
    names = [name for name, count in counts.items() if count > 1]
    if not names:
        return None
    tabled: dict[tuple[float, str], dict[str, Any]] = {}
    for run in runs:
        for row in run["validation"]:
            tabled[row["samples"], run["label"]] = {**row, "run": run["label"]}
    columns = (
        Column(title="samples", field="samples", show=count_text),
        Column(title="run", field="run", words=True),
        *(Column(title=name, field=name, show=significant) for name in names),
    )
    rows = [tabled[key] for key in sorted(tabled)]
    return Section(
        title="Validation",
        panels=tuple(_validation_panel(document, name) for name in names),
        table=Table(caption="Validation of each run", columns=columns, rows=rows),
    )


def _validation_panel(document: Mapping[str, Any], name: str) -> Panel:
    having = [run for run in document["runs"] if any(name in row for row in run["validation"])]
    labels = {run["label"] for run in having}
    lines = [line for line in lines_of(document) if line.label in labels]
    rows, words = [], []
    for run in having:
        own = [(row["samples"], row[name]) for row in run["validation"] if name in row]
        rows += [
            {"x": at, "y": value, "line": run["label"], "label": count_text(at), "shown": significant(value)}
            for at, value in own
        ]
        course = trend_words([(f"{count_text(at)} samples", value) for at, value in own], significant)
        words.append(f"{run['label']} {course}")
    title = f"Validation {name} against samples"
    return Panel(
        title=title,
        spec=draw_curves(rows, lines=lines, x_title="samples seen", title=name),
        alternative=f"{title}: {'; '.join(words)}.",
        keys=tuple(line.key() for line in lines),
    )


def _metric_section(document: Mapping[str, Any]) -> Section | None:
    runs = document["runs"]
    names = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
    if not names:
        return None
    rows = []
    for name in names:
        figures = [run["metrics"].get(name, {}) for run in runs]
        shown = {str(place): spread_text(one.get("mean"), one.get("deviation")) for place, one in enumerate(figures)}
        rows.append({"name": name, **shown})
    columns = (Column(title="metric", field="name", words=True), *run_columns(document, text))
    table = Table(caption="Figures of the best epoch, over seeds where there are several", columns=columns, rows=rows)
    return Section(title="Metrics", table=table, table_open=True)


def _method_section(document: Mapping[str, Any]) -> Section | None:
    if not document["methods"]:
        return None
    rows = []
    for entry in document["methods"]:
        for name, title in METRICS.items():
            figures = [None if value is None else value[name] for value in entry["values"]]
            shown = [UNMEASURED if one is None else spread_text(one["mean"], one["deviation"]) for one in figures]
            rows.append({**entry, "metric": title, **{str(place): one for place, one in enumerate(shown)}})
    columns = (
        Column(title="method", field="method", words=True),
        Column(title="data", field="data", words=True),
        Column(title="encoder", field="encoder", words=True),
        Column(title="metric", field="metric", words=True),
        *run_columns(document, text),
    )
    table = Table(caption="Mean ± deviation over seeds, method by data set", columns=columns, rows=rows)
    return Section(title="Methods", table=table, table_open=True)


def _figure_section(document: Mapping[str, Any]) -> Section:
    rows = []
    for name, (title, show) in _FIGURES.items():
        values = [run[name] for run in document["runs"]]
        if any(value is not None for value in values):
            rows.append({"name": title, **{str(place): show(value) for place, value in enumerate(values)}})
    columns = (Column(title="figure", field="name", words=True), *run_columns(document, text))
    table = Table(caption="Sizes, speed and memory of each run", columns=columns, rows=rows)
    return Section(title="Sizes, speed and memory", table=table, table_open=True)
