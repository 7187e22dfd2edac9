"""Trainings side by side, old and new settings: loss against samples and against time, figures, sizes, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, value_at
from brim.errors import plural
from brim.reporting.base import (
    Column,
    Fact,
    Page,
    PageTable,
    RunKind,
    Section,
    facts,
    figure_table,
    present,
    run_columns,
    words,
)
from brim.reporting.charts import Axis, Chart, line_chart, time_unit
from brim.reporting.kinds.compared import (
    by_place,
    comparison_document,
    difference_section,
    header_of,
    labels_of,
    note_on_data,
    trained_on,
)
from brim.reporting.kinds.preference import METRICS, PLACE_COLUMNS, method_rows
from brim.reporting.kinds.training import FIGURES, SAMPLES, curve_row, training_page
from brim.reporting.kinds.training_files import (
    TrainingRun,
    figure_names,
    is_preference,
    read_training,
    samples_to_reach,
    seed_rows,
    smoothed,
)
from brim.reporting.theme import series_for
from brim.units import (
    count_text,
    duration_text,
    number,
    ratio_text,
    signed_text,
    significant,
    spread_text,
)

__all__ = ["TRAINING", "compare_trainings"]

# Figures of a run that a comparison's document has.
_COMPARED = (
    "effective_batch_size", "micro_batch_size", "accumulation_steps", "samples_per_second", "pairs_per_second",
    "samples", "steps", "seconds", "peak_allocated_bytes", "peak_reserved_bytes", "oom_events", "gpu_utilisation_mean",
)  # fmt: skip


def compare_trainings(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """Every run's curves, figures and metrics; the first is what others are held to."""
    labels = labels_of([run.folder for run in runs])
    trainings = [None if is_preference(run) else read_training(run) for run in runs]
    described = [_described(run, label, training) for run, label, training in zip(runs, labels, trainings, strict=True)]
    reached = described[0]["final_loss"]
    for entry, training in zip(described, trainings, strict=True):
        entry["samples_to_first_s_loss"] = None if training is None else samples_to_reach(training.steps.spans, reached)
    document = comparison_document(
        runs, note_on_data(runs, labels), runs=described, methods=_methods(runs), notes=_notes(described, trainings)
    )
    return document, _page(document, runs, labels)


def _described(run: Run, label: str, training: TrainingRun | None) -> dict[str, Any]:
    figures = {name: number(run.summary.get(name)) for name in _COMPARED}
    figures["useful_batch"] = number(value_at(run.summary, "noise_scale.useful_batch"))
    metrics = {
        row["name"]: {field: row[field] for field in ("mean", "deviation", "values")}
        for row in seed_rows(run.summary.get("metrics"), [])
    }
    model, data = ("preference training", None) if training is None else trained_on(run)
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
    fields = ("method", "data", "encoder")
    by_run = [
        {tuple(row[field] for field in fields): row for row in method_rows(run.summary.get("table"))} for run in runs
    ]
    keys = dict.fromkeys(key for rows in by_run for key in rows)
    return [
        {**dict(zip(fields, key, strict=True)), "values": [_method_figures(rows.get(key)) for rows in by_run]}
        for key in keys
    ]


def _method_figures(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {n: {"mean": row[n], "deviation": row[f"{n} deviation"]} for n in METRICS}


def _notes(described: Sequence[Mapping[str, Any]], trainings: Sequence[TrainingRun | None]) -> list[str]:
    notes = []
    if len({training is None for training in trainings}) > 1:
        notes.append("some are preference trainings and some are not: they have no curve and no metric in common")
    elif len({entry["model"] for entry in described}) > 1:
        said = ", ".join(f"{entry['label']}: {entry['model']}" for entry in described)
        notes.append(f"not the same model, so losses are of different models ({said})")
    for entry, training in zip(described, trainings, strict=True):
        if training is not None and not entry["curve"]:
            notes.append(f"{entry['label']} has no steps.jsonl, so it has no curve")
    return notes


def _page(document: Mapping[str, Any], runs: Sequence[Run], labels: Sequence[str]) -> Page:
    """Curves first, then metrics, sizes and speed, and the settings that differ."""
    figures = figure_table("Sizes, speed and memory of each run", FIGURES, [run.summary for run in runs], labels)
    return Page(
        title=f"{plural(len(runs), 'training')} compared",
        subtitle=" · ".join(labels),
        headline=f"{labels[1]} against {labels[0]}",
        facts=_facts(*document["runs"][:2], same_data=not document["data_differs"]),
        warnings=(*document["warnings"], *document["notes"]),
        sections=present(
            _loss_section(document),
            _validation_section(document),
            _metric_section(document, labels),
            _method_section(document, labels),
            Section(title="Sizes, speed and memory", table=figures),
            difference_section(document),
        ),
    )


def _facts(first: Mapping[str, Any], second: Mapping[str, Any], *, same_data: bool) -> tuple[Fact, ...]:
    """How the second differs from the first; figures of what was learnt only where both learnt from the same data."""
    learnt = [
        Fact(name, signed_text(after - before), f"{significant(after)} against {significant(before)}")
        for name, figure in second["metrics"].items()
        if same_data and name in first["metrics"] and name != "train_loss"
        for before, after in [(first["metrics"][name]["mean"], figure["mean"])]
    ]
    rate, batch, reached = (
        (first[name], second[name])
        for name in ("samples_per_second", "effective_batch_size", "samples_to_first_s_loss")
    )
    return facts(
        *learnt[:3],
        Fact("throughput", ratio_text(rate[1] / rate[0]), f"{significant(rate[1])} samples/s") if all(rate) else None,
        Fact("effective batch", count_text(batch[1]), f"against {count_text(batch[0])}") if all(batch) else None,
        Fact(
            "samples to the same loss",
            ratio_text(reached[1] / reached[0]),
            f"{count_text(reached[1])} against {count_text(reached[0])}",
        )
        if same_data and all(reached)
        else None,
    )


def _loss_section(document: Mapping[str, Any]) -> Section | None:
    """The training loss of all runs against samples, and against time."""
    runs = document["runs"]
    if not any(run["curve"] for run in runs):
        return None
    unit, size = time_unit(max(run["curve"][-1]["seconds"] for run in runs if run["curve"]))
    seconds = Axis(f"time in steps ({unit})", "span")
    rows = [
        {"name": run["label"], "final": run["final_loss"], "reached": run["samples_to_first_s_loss"],
         **(run["curve"][-1] if run["curve"] else {})}
        for run in runs
    ]  # fmt: skip
    columns = (
        words("run", "name"), Column("last loss", "final", significant),
        Column(f"samples to the last loss of {runs[0]['label']}", "reached", _or_never, always=True),
        Column("samples", "samples", count_text), Column("time in steps", "seconds", duration_text),
    )  # fmt: skip
    return Section(
        title="Loss of old and new settings",
        paragraphs=("Running means over a twentieth of each run, by the loss that each was trained with.",),
        charts=present(
            _curve_chart("Training loss against samples", runs, "curve", ("samples", "loss"), SAMPLES),
            _curve_chart(
                "Training loss against time", runs, "curve", ("seconds", "loss"), seconds, duration_text, size
            ),
        ),
        table=PageTable("The end of each run", columns, rows),
        open=True,
    )


def _or_never(value: object) -> str:
    return "not reached" if value is None else count_text(value)


def _curve_chart(
    title: str, runs: Sequence[Mapping[str, Any]], part: str, fields: tuple[str, str], x: Axis,
    show: Callable[[object], str] = count_text, size: float = 1.0,
) -> Chart | None:  # fmt: skip
    """A figure of every run that has it, a line for each."""
    at, figure = fields
    rows = [
        curve_row(point[at] / size, point[figure], run["label"], label=show(point[at]))
        for run in runs
        for point in run[part]
        if figure in point
    ]
    series = series_for([run["label"] for run in runs])
    y = Axis(figure, "near" if figure == "loss" else "score")
    return line_chart(title, rows, x=x, y=y, series=series)


def _validation_section(document: Mapping[str, Any]) -> Section | None:
    """Every figure of validation that two runs or more have, against samples."""
    runs = document["runs"]
    having = [{name for row in run["validation"] for name in row if name != "samples"} for run in runs]
    names = dict.fromkeys(name for run in runs for row in run["validation"] for name in row)
    shared = [name for name in names if sum(name in own for own in having) > 1]
    if not shared:
        return None
    columns = (
        Column("samples", "samples", count_text), words("run"),
        *(Column(name, name, significant) for name in shared),
    )  # fmt: skip
    rows = [{**row, "run": run["label"]} for run in runs for row in run["validation"]]
    return Section(
        title="Validation",
        charts=present(
            *(
                _curve_chart(f"Validation {name} against samples", runs, "validation", ("samples", name), SAMPLES)
                for name in shared
            )
        ),
        table=PageTable("Validation of each run", columns, sorted(rows, key=lambda row: (row["samples"], row["run"]))),
    )


def _metric_section(document: Mapping[str, Any], labels: Sequence[str]) -> Section | None:
    names = dict.fromkeys(name for run in document["runs"] for name in run["metrics"])
    rows = []
    for name in names:
        figures = [run["metrics"].get(name, {}) for run in document["runs"]]
        rows.append({"name": name, **by_place([spread_text(one.get("mean"), one.get("deviation")) for one in figures])})
    columns = (words("metric", "name"), *run_columns(labels))
    table = PageTable("Figures of the best epoch, over seeds where there are several", columns, rows)
    return Section(title="Metrics", table=table) if rows else None


def _method_section(document: Mapping[str, Any], labels: Sequence[str]) -> Section | None:
    rows = []
    for entry in document["methods"]:
        for name, title in METRICS.items():
            shown = [
                "not run" if one is None else spread_text(one[name]["mean"], one[name]["deviation"])
                for one in entry["values"]
            ]
            rows.append({**entry, "metric": title, **by_place(shown)})
    columns = (*PLACE_COLUMNS, words("metric"), *run_columns(labels))
    table = PageTable("Mean ± deviation over seeds, method by data set", columns, rows)
    return Section(title="Methods", table=table) if rows else None


TRAINING = RunKind(name="train", page=training_page, compare=compare_trainings)
