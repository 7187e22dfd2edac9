"""The page of a preference training: method × data set with mean and deviation, each seed, sizes, speed and peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping, value_at
from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, PageTable, Section, facts, note_section, present, words
from brim.reporting.charts import Axis, Chart, category_chart, interval_ends
from brim.reporting.kinds.seeds import seed_chart
from brim.reporting.kinds.training_files import read_cells
from brim.reporting.machine import machine_section
from brim.reporting.repeat import repeat_sections
from brim.reporting.theme import series_for
from brim.units import bytes_text, count_text, duration_text, listed, number, score_text, significant, text

__all__ = ["METRICS", "PLACE_COLUMNS", "method_rows", "preference_page"]

METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}  # of the last, lower is better
LEFT_OUT = 20  # molecules that are each named
_PHASES = ("encoding", "training", "evaluation")

PLACE_COLUMNS = (words("method"), words("data"), words("encoder"))
METHOD_COLUMNS = (
    *PLACE_COLUMNS,
    *(Column(title, f"{metric} shown") for metric, title in METRICS.items()),
    Column("seeds", "num_seeds", count_text),
    Column("failed", "failed", count_text),
)
SEED_COLUMNS = (
    *PLACE_COLUMNS,
    Column("seed", "seed"),
    *(Column(title, metric, score_text) for metric, title in METRICS.items()),
    Column("learning rate", "lr", significant),
    Column("epochs", "epochs", count_text),
    Column("best epoch", "best_epoch", count_text),
    Column("validation AUROC", "validation_auroc", score_text),
    Column("last loss", "last_loss", significant),
    words("error"),
)
LOSS_COLUMNS = (
    *PLACE_COLUMNS,
    Column("seed", "seed"),
    *(Column(f"{name} loss", name, significant) for name in ("first", "lowest", "last")),
)
TRAINING_COLUMNS = (
    *PLACE_COLUMNS,
    Column("runs", "runs", count_text),
    words("path", "fast_path"),
    words("why", "reason"),
    Column("batch", "effective_batch_size", count_text),
    Column("micro-batch", "micro_batch_size", count_text),
    Column("in a step", "accumulation_steps", count_text),
    Column("samples/s", "samples_per_second", significant),
    Column("pairs/s", "pairs_per_second", significant),
    Column("OOM events", "oom_events", count_text),
    Column("reserved", "peak_reserved_bytes", bytes_text),
    Column("training", "train_seconds", duration_text),
)
MEMORY_COLUMNS = (
    words("phase", "name"),
    Column("peak allocated", "peak_allocated_bytes", bytes_text),
    Column("peak reserved", "peak_reserved_bytes", bytes_text),
)


def preference_page(run: Run) -> Page:
    """Headline, table, seeds, trainings, memory, molecules left out, machine, settings."""
    summary = run.summary
    rows = method_rows(summary.get("table"))
    sets = list(dict.fromkeys(row["set"] for row in rows))
    cells = read_cells(run)
    method = str(summary.get("method") or "dpo")
    return Page(
        title="Preference training",
        subtitle=f"on {listed(sets) or 'no data'}; {plural(len(rows), 'row')} of method and data in {run.duration}",
        headline=_headline(method, summary, len(sets)),
        facts=_facts(summary),
        remarks=_remarks(rows, method),
        warnings=_warnings(summary),
        sections=present(
            _method_section(rows, sets),
            _seed_section(cells),
            _loss_section(cells),
            _training_section(summary),
            _memory_section(summary),
            _left_out_section(summary),
            machine_section([("", run.trace())], limit_bytes=None),
            note_section(summary.get("notes")),
            *repeat_sections(run),
        ),
    )


def method_rows(table: object) -> list[dict[str, Any]]:
    """A row for each method, data set and encoder; each metric as `auroc`, `auroc deviation`, `auroc shown`."""
    rows = []
    for entry in entries(table):
        found = entry.get("seeds")
        seeds = found if isinstance(found, list) else []
        row: dict[str, Any] = {
            **{field: str(entry.get(field)) for field in ("data", "encoder", "method")},
            "seeds": seeds, "num_seeds": len(seeds) or None, "failed": number(entry.get("failed")) or 0,
        }  # fmt: skip
        for name in METRICS:
            figure = mapping(entry.get(name))
            values = figure.get("values")
            row |= {
                name: number(figure.get("mean")), f"{name} deviation": number(figure.get("deviation")),
                f"{name} values": [number(value) for value in values] if isinstance(values, list) else [],
                f"{name} shown": _spread(figure),
            }  # fmt: skip
        rows.append(row)
    several = len({row["encoder"] for row in rows}) > 1
    return [{**row, "set": f"{row['data']}, {row['encoder']}" if several else row["data"]} for row in rows]


def _spread(figure: Mapping[str, Any]) -> str:
    half = number(figure.get("deviation"))
    return score_text(figure.get("mean")) + ("" if half is None else f" ± {score_text(half)}")


def _headline(method: str, summary: Mapping[str, Any], num_sets: int) -> str:
    figure, seeds = mapping(value_at(summary, "metrics.auroc")), summary.get("seeds")
    if number(figure.get("mean")) is None:
        return f"{method}: no seed has a result"
    over = f" over {plural(len(seeds), 'seed')}" if isinstance(seeds, list) and len(seeds) > 1 else ""
    mean = f", mean of {num_sets} data sets" if num_sets > 1 else ""
    return f"{method}: AUROC {_spread(figure)}{over}{mean}"


def _facts(summary: Mapping[str, Any]) -> tuple[Fact, ...]:
    parts = f"{count_text(summary.get('accumulation_steps'))} × {count_text(summary.get('micro_batch_size'))}"
    return facts(
        *(Fact(METRICS[name], _spread(mapping(value_at(summary, f"metrics.{name}")))) for name in ("aupr", "fpr95")),
        Fact("throughput", f"{significant(summary.get('pairs_per_second'))} pairs/s"),
        Fact("batch", count_text(summary.get("effective_batch_size")), parts),
        Fact("path", text(summary.get("fast_path") or None)),
        Fact("reserved memory", bytes_text(summary.get("peak_reserved_bytes")), "training"),
    )


def _remarks(rows: Sequence[Mapping[str, Any]], method: str) -> tuple[str, ...]:
    """Whether the first head beats every other method, data set by data set; figures shown as equal are a tie."""
    sentences = []
    for name in dict.fromkeys(row["set"] for row in rows):
        known = [row for row in rows if row["set"] == name and row["auroc"] is not None]
        own = next((row for row in known if row["method"] == method), None)
        rivals = [row for row in known if row["method"] != method]
        if own is None or not rivals:
            continue
        best, second = (max(some, key=lambda row: row["auroc"]) for some in (known, rivals))
        top = score_text(best["auroc"])
        tied = [row["method"] for row in (own, *rivals) if score_text(row["auroc"]) == top]
        if len(tied) > 1:
            said = f"{listed(tied)} have the same AUROC, {top}, and none is higher"
        else:
            said = f"{best['method']} has the highest AUROC, {best['auroc shown']}"
            said += f"; next is {second['method']} with {second['auroc shown']}" if best is own else ""
        sentences.append(f"On {name}: {said}" + ("." if method in tied else f"; {method} has {own['auroc shown']}."))
    return tuple(sentences)


def _warnings(summary: Mapping[str, Any]) -> tuple[str, ...]:
    failed, errors = int(number(summary.get("num_failed")) or 0), summary.get("errors")
    first = f": {errors[0]}" if isinstance(errors, list) and errors else ""
    left_out = len(_left_out(summary))
    return present(
        f"{plural(failed, 'cell')} of {count_text(summary.get('num_cells'))} failed{first}" if failed else None,
        f"{plural(left_out, 'molecule')} could not be read and were left out." if left_out else None,
    )


def _method_section(rows: Sequence[Mapping[str, Any]], sets: Sequence[str]) -> Section | None:
    if not rows:
        return None
    said = "Mean ± deviation over seeds; a method without randomness has one value. An AUROC of 0.5 is chance."
    charts = present(*(_method_chart(rows, sets, metric) for metric in METRICS))
    table = PageTable("Method by data set", METHOD_COLUMNS, rows)
    return Section(title="Methods", paragraphs=(said,), charts=charts, table=table, open=True)


def _method_chart(rows: Sequence[Mapping[str, Any]], sets: Sequence[str], metric: str) -> Chart | None:
    """Each row's mean with the ends of its deviation, and each seed's value."""
    drawn, strokes = [], []
    for row in rows:
        mean, half = row[metric], row[f"{metric} deviation"]
        if mean is None:
            continue
        place = {"name": row["method"], "line": row["set"]}
        drawn.append({**place, "x": mean, "shown": row[f"{metric} shown"], **interval_ends(mean, half)})
        strokes += [
            {**place, "x": value, "seed": str(seed), "shown": score_text(value)}
            for seed, value in zip(row["seeds"], row[f"{metric} values"], strict=False)
            if value is not None and half is not None
        ]
    title = METRICS[metric]
    return category_chart(
        f"{title}, lower is better" if metric == "fpr95" else title, drawn, x=Axis(title, "score"), what="method",
        of="data", series=series_for(sets), strokes=strokes, rule=0.5 if metric == "auroc" else None,
    )  # fmt: skip


def _seed_section(cells: Sequence[Mapping[str, Any]]) -> Section | None:
    """Every cell of the journal: its metrics and, of a head, how its training went."""
    details = ("epochs", "best_epoch", "validation_auroc", "last_loss", "skipped_steps")
    rows = [
        {**{field: cell.get(field) for field in ("method", "data", "encoder", "seed", "lr", "error")},
         **{name: number(value_at(cell, f"metrics.{name}")) for name in METRICS},
         **{name: number(value_at(cell, f"details.{name}")) for name in details}}
        for cell in cells
    ]  # fmt: skip
    table = PageTable("Every seed's value", SEED_COLUMNS, rows)
    return Section(title="Seeds", table=table, open=len(rows) <= 12) if rows else None


def _loss_section(cells: Sequence[Mapping[str, Any]]) -> Section | None:
    """The loss of every head by epoch, a chart for each data set and encoder."""
    groups: dict[tuple[str, str], dict[str, dict[str, list[tuple[float, float]]]]] = {}
    rows = []
    for cell in cells:
        data, encoder, method, seed = (text(cell.get(field)) for field in ("data", "encoder", "method", "seed"))
        losses = value_at(cell, "details.losses")
        known = [number(loss) for loss in losses] if isinstance(losses, list) else []
        curve = [(float(epoch), loss) for epoch, loss in enumerate(known, start=1) if loss is not None]
        if curve:
            groups.setdefault((data, encoder), {}).setdefault(method, {})[f"seed {seed}"] = curve
            rows.append({"method": method, "data": data, "encoder": encoder, "seed": seed, "first": curve[0][1],
                         "lowest": min(loss for _, loss in curve), "last": curve[-1][1]})  # fmt: skip
    if not rows:
        return None
    charts = (
        seed_chart(methods, title=f"Training loss on {data}, {encoder}", figure="loss")
        for (data, encoder), methods in groups.items()
    )
    return Section(
        title="Loss",
        paragraphs=("Losses of different methods are different figures: compare the courses, not the heights.",),
        charts=present(*charts),
        table=PageTable("Loss of each head: first epoch, lowest, last epoch", LOSS_COLUMNS, rows),
    )


def _training_section(summary: Mapping[str, Any]) -> Section | None:
    rows = [{**one, "reason": value_at(one, "fast_path_choice.reason")} for one in entries(summary.get("trainings"))]
    table = PageTable("Each training: all its seeds and learning rates", TRAINING_COLUMNS, rows)
    said = "A run is one seed at one learning rate; a stack trains several as one."
    return Section(title="Sizes and speed", paragraphs=(said,), table=table) if rows else None


def _memory_section(summary: Mapping[str, Any]) -> Section | None:
    """Peak memory of encoding, training and evaluation, apart."""
    phases = {phase: mapping(value_at(summary, f"peaks.{phase}")) for phase in _PHASES}
    rows = [
        {"name": phase, **figures}
        for phase, figures in phases.items()
        if any(number(value) is not None for value in figures.values())
    ]
    table = PageTable("Peak memory, phase by phase", MEMORY_COLUMNS, rows)
    return Section(title="Memory", table=table) if rows else None


def _left_out(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"where": place, "data": data, "why": text(why)}
        for data, places in mapping(summary.get("molecules_left_out")).items()
        for place, why in mapping(places).items()
    ]


def _left_out_section(summary: Mapping[str, Any]) -> Section | None:
    rows = _left_out(summary)
    shown = rows[:LEFT_OUT]
    caption = f"The first {len(shown)} of {plural(len(rows), 'molecule')} that could not be read"
    table = PageTable(caption, (words("where"), words("data"), words("why")), shown)
    return Section(title="Molecules left out", table=table) if rows else None
