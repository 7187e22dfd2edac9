"""The page of a preference training: method × data set with mean and deviation, each seed, sizes, speed and peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.spreads import draw_spreads
from brim.reporting.charts.theme import lines_for
from brim.reporting.kinds.training_seeds import seed_panel
from brim.reporting.read import Run
from brim.reporting.rows.preference import METRICS, best_rows, cell_rows, loss_points, method_rows, spread_rows
from brim.reporting.sections.machine import machine_section
from brim.reporting.sections.settings import settings_sections
from brim.reporting.training_run import read_cells
from brim.reporting.units import bytes_text, count_text, duration_text, number, score_text, significant, text
from brim.reporting.wording import listed

__all__ = ["preference_page"]

LEFT_OUT = 20  # molecules that are each named
_PHASES = ("encoding", "training", "evaluation")


def preference_page(run: Run) -> Page:
    """Headline, table, seeds, trainings, memory, molecules left out, machine, settings."""
    summary = run.summary
    rows = method_rows(summary.get("table"))
    sets = list(dict.fromkeys(row["set"] for row in rows))
    cells = read_cells(run)
    sections = [
        _method_section(rows, sets),
        _seed_section(cell_rows(cells)),
        _loss_section(cells),
        _training_section(summary),
        _memory_section(summary),
        _left_out_section(summary),
        machine_section([("", run.trace())], limit_bytes=None),
        _notes(summary),
        *settings_sections(run),
    ]
    method = str(summary.get("method") or "dpo")
    metrics = summary.get("metrics")
    headline = _headline(method, metrics if isinstance(metrics, dict) else {}, summary.get("seeds"), len(sets))
    return Page(
        title="Preference training",
        subtitle=f"on {listed(sets) or 'no data'}; {plural(len(rows), 'row')} of method and data in "
        f"{duration_text(run.document.get('duration_seconds'))}",
        headline=headline,
        facts=_facts(summary),
        remarks=_remarks(rows, method),
        warnings=_warnings(summary),
        sections=tuple(section for section in sections if section is not None),
    )


def _headline(method: str, metrics: Mapping[str, Any], seeds: object, num_sets: int) -> str:
    figure = metrics.get("auroc")
    if not isinstance(figure, dict) or number(figure.get("mean")) is None:
        return f"{method}: no seed has a result"
    over = f" over {plural(len(seeds), 'seed')}" if isinstance(seeds, list) and len(seeds) > 1 else ""
    mean = f", mean of {num_sets} data sets" if num_sets > 1 else ""
    return f"{method}: AUROC {_spread(figure)}{over}{mean}"


def _spread(figure: object) -> str:
    if not isinstance(figure, dict):
        return score_text(None)
    half = number(figure.get("deviation"))
    return score_text(figure.get("mean")) + ("" if half is None else f" ± {score_text(half)}")


def _facts(summary: Mapping[str, Any]) -> tuple[Fact, ...]:
    metrics = summary.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    facts = [Fact(name=METRICS[name], value=_spread(metrics[name])) for name in ("aupr", "fpr95") if name in metrics]
    if number(summary.get("pairs_per_second")) is not None:
        facts.append(Fact(name="throughput", value=f"{significant(summary.get('pairs_per_second'))} pairs/s"))
    if number(summary.get("effective_batch_size")) is not None:
        parts = f"{count_text(summary.get('accumulation_steps'))} × {count_text(summary.get('micro_batch_size'))}"
        facts.append(Fact(name="batch", value=count_text(summary.get("effective_batch_size")), note=parts))
    if summary.get("fast_path"):
        facts.append(Fact(name="path", value=str(summary.get("fast_path"))))
    if number(summary.get("peak_reserved_bytes")) is not None:
        facts.append(
            Fact(name="reserved memory", value=bytes_text(summary.get("peak_reserved_bytes")), note="training")
        )
    return tuple(facts)


def _remarks(rows: Sequence[Mapping[str, Any]], method: str) -> tuple[str, ...]:
    """Whether the first head beats every other method, data set by data set; figures shown as equal are a tie."""
    told = []
    for name, best in best_rows(rows).items():
        own = next((row for row in rows if row["set"] == name and row["method"] == method), None)
        rivals = [row for row in rows if row["set"] == name and row["method"] != method and row["auroc"] is not None]
        if own is None or own["auroc"] is None or not rivals:
            continue
        top = score_text(best["auroc"])
        tied = [row["method"] for row in (own, *rivals) if score_text(row["auroc"]) == top]
        if len(tied) > 1:
            words = f"{listed(tied)} have the same AUROC, {top}, and none is higher"
        elif best is own:
            second = max(rivals, key=lambda row: row["auroc"])
            words = f"{method} has the highest AUROC, {own['auroc shown']}; next is {second['method']} with "
            words += second["auroc shown"]
        else:
            words = f"{best['method']} has the highest AUROC, {best['auroc shown']}"
        told.append(f"On {name}: {words}" + ("." if method in tied else f"; {method} has {own['auroc shown']}."))
    return tuple(told)


def _warnings(summary: Mapping[str, Any]) -> tuple[str, ...]:
    told = []
    if failed := int(number(summary.get("num_failed")) or 0):
        errors = summary.get("errors")
        first = f": {errors[0]}" if isinstance(errors, list) and errors else ""
        told.append(f"{plural(failed, 'cell')} of {count_text(summary.get('num_cells'))} failed{first}")
    left_out = _left_out(summary)
    if left_out:
        told.append(f"{plural(len(left_out), 'molecule')} could not be read and were left out.")
    return tuple(told)


def _method_section(rows: Sequence[Mapping[str, Any]], sets: Sequence[str]) -> Section | None:
    if not rows:
        return None
    lines = lines_for(list(sets))
    panels = []
    for metric, title in METRICS.items():
        drawn, dots = spread_rows(rows, metric)
        if not drawn:
            continue
        words = "; ".join(f"{row['name']} {row['shown']}" + (f" on {row['line']}" if len(sets) > 1 else "")
                          for row in drawn)  # fmt: skip
        better = ", lower is better" if metric == "fpr95" else ""
        seeds = " A stroke is a seed." if dots else ""
        panels.append(
            Panel(
                title=f"{title}{better}",
                spec=draw_spreads(drawn, dots, lines=lines, x_title=title, what="method",
                                  rule=0.5 if metric == "auroc" else None),
                alternative=f"{title} by method: {words}.{seeds}",
                keys=tuple(line.key() for line in lines) if len(lines) > 1 else (),
            )
        )  # fmt: skip
    columns = (
        Column(title="method", field="method", words=True),
        Column(title="data", field="data", words=True),
        Column(title="encoder", field="encoder", words=True),
        *(Column(title=title, field=f"{metric} shown") for metric, title in METRICS.items()),
        Column(title="seeds", field="num_seeds", show=count_text),
        Column(title="failed", field="failed", show=count_text),
    )
    said = "Mean ± deviation over seeds; a method without randomness has one value. An AUROC of 0.5 is chance."
    table = Table(caption="Method by data set", columns=columns, rows=rows)
    return Section(title="Methods", paragraphs=(said,), panels=tuple(panels), table=table, table_open=True)


def _seed_section(rows: Sequence[Mapping[str, Any]]) -> Section | None:
    if not rows:
        return None
    columns = (
        Column(title="method", field="method", words=True),
        Column(title="data", field="data", words=True),
        Column(title="encoder", field="encoder", words=True),
        Column(title="seed", field="seed"),
        *(Column(title=title, field=metric, show=score_text) for metric, title in METRICS.items()),
        Column(title="learning rate", field="lr", show=significant),
        Column(title="epochs", field="epochs", show=count_text),
        Column(title="best epoch", field="best_epoch", show=count_text),
        Column(title="validation AUROC", field="validation_auroc", show=score_text),
        Column(title="last loss", field="last_loss", show=significant),
        Column(title="error", field="error", words=True),
    )
    table = Table(caption="Every seed's value", columns=columns, rows=rows).known()
    return Section(title="Seeds", table=table, table_open=len(rows) <= 12)


def _loss_section(cells: Sequence[Mapping[str, Any]]) -> Section | None:
    """The loss of every head by epoch, a chart for each data set and encoder."""
    groups: dict[tuple[str, str], dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for cell in cells:
        place = (text(cell.get("data")), text(cell.get("encoder")))
        curves = groups.setdefault(place, {}).setdefault(text(cell.get("method")), {})
        curves[f"seed {text(cell.get('seed'))}"] = loss_points(cell)
    panels = []
    for (data, encoder), methods in groups.items():
        panel = seed_panel(methods, title=f"Training loss on {data}, {encoder}", figure="loss")
        if panel is not None:
            panels.append(panel)
    said = "Losses of different methods are different figures: compare the courses, not the heights."
    if not panels:
        return None
    rows = [
        {"method": method, "data": data, "encoder": encoder, "seed": seed.removeprefix("seed "),
         "first": curve[0][1], "lowest": min(loss for _, loss in curve), "last": curve[-1][1]}
        for (data, encoder), methods in groups.items()
        for method, curves in methods.items()
        for seed, curve in curves.items()
        if curve
    ]  # fmt: skip
    columns = (
        *(Column(title=name, field=name, words=True) for name in ("method", "data", "encoder")),
        Column(title="seed", field="seed"),
        *(Column(title=f"{name} loss", field=name, show=significant) for name in ("first", "lowest", "last")),
    )
    table = Table(caption="Loss of each head: first epoch, lowest, last epoch", columns=columns, rows=rows)
    return Section(title="Loss", paragraphs=(said,), panels=tuple(panels), table=table)


def _training_section(summary: Mapping[str, Any]) -> Section | None:
    trainings = summary.get("trainings")
    rows = []
    for one in trainings if isinstance(trainings, list) else []:
        if not isinstance(one, dict):
            continue
        choice = one.get("fast_path_choice")
        rows.append({**one, "reason": choice.get("reason") if isinstance(choice, dict) else None})
    if not rows:
        return None
    columns = (
        Column(title="method", field="method", words=True),
        Column(title="data", field="data", words=True),
        Column(title="encoder", field="encoder", words=True),
        Column(title="runs", field="runs", show=count_text),
        Column(title="path", field="fast_path", words=True),
        Column(title="why", field="reason", words=True),
        Column(title="batch", field="effective_batch_size", show=count_text),
        Column(title="micro-batch", field="micro_batch_size", show=count_text),
        Column(title="in a step", field="accumulation_steps", show=count_text),
        Column(title="samples/s", field="samples_per_second", show=significant),
        Column(title="pairs/s", field="pairs_per_second", show=significant),
        Column(title="OOM events", field="oom_events", show=count_text),
        Column(title="reserved", field="peak_reserved_bytes", show=bytes_text),
        Column(title="training", field="train_seconds", show=duration_text),
    )
    table = Table(caption="Each training: all its seeds and learning rates", columns=columns, rows=rows).known()
    said = "A run is one seed at one learning rate; a stack trains several as one."
    return Section(title="Sizes and speed", paragraphs=(said,), table=table, table_open=True)


def _memory_section(summary: Mapping[str, Any]) -> Section | None:
    """Peak memory of encoding, training and evaluation, apart."""
    peaks = summary.get("peaks")
    peaks = peaks if isinstance(peaks, dict) else {}
    rows = []
    for phase in _PHASES:
        figures = peaks.get(phase)
        if isinstance(figures, dict) and any(number(value) is not None for value in figures.values()):
            rows.append({"name": phase, **figures})
    if not rows:
        return None
    columns = (
        Column(title="phase", field="name", words=True),
        Column(title="peak allocated", field="peak_allocated_bytes", show=bytes_text),
        Column(title="peak reserved", field="peak_reserved_bytes", show=bytes_text),
    )
    table = Table(caption="Peak memory, phase by phase", columns=columns, rows=rows)
    return Section(title="Memory", table=table, table_open=True)


def _left_out(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = summary.get("molecules_left_out")
    return [
        {"place": place, "data": data, "why": text(why)}
        for data, places in (found.items() if isinstance(found, dict) else ())
        if isinstance(places, dict)
        for place, why in places.items()
    ]


def _left_out_section(summary: Mapping[str, Any]) -> Section | None:
    rows = _left_out(summary)
    if not rows:
        return None
    columns = (
        Column(title="where", field="place", words=True),
        Column(title="data", field="data", words=True),
        Column(title="why", field="why", words=True),
    )
    shown = rows[:LEFT_OUT]
    caption = f"The first {len(shown)} of {plural(len(rows), 'molecule')} that could not be read"
    return Section(
        title="Molecules left out", table=Table(caption=caption, columns=columns, rows=shown), table_open=True
    )


def _notes(summary: Mapping[str, Any]) -> Section | None:
    notes = summary.get("notes")
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return Section(title="Notes", points=lines) if lines else None
