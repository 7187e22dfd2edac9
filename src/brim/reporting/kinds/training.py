"""The page of a training: its figures, how the loss fell, and at which batch, rate, speed and memory.

Preference training has tables instead of epochs and a page of its own (`preference.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping, value_at
from brim.errors import plural
from brim.reporting.base import (
    Column,
    Fact,
    Figure,
    Page,
    PageTable,
    Section,
    facts,
    figure_table,
    note_section,
    present,
    words,
)
from brim.reporting.charts import (
    Axis,
    Chart,
    Marks,
    Row,
    category_chart,
    crosses,
    interval_ends,
    limit_line,
    line_chart,
)
from brim.reporting.kinds.compared import trained_on
from brim.reporting.kinds.preference import preference_page
from brim.reporting.kinds.seeds import runs_section
from brim.reporting.kinds.training_files import (
    TrainingRun,
    figure_names,
    is_preference,
    read_training,
    schedule_rows,
    seed_rows,
    smoothed,
)
from brim.reporting.machine import machine_section
from brim.reporting.repeat import repeat_sections
from brim.reporting.search import plan_section
from brim.reporting.theme import LIMIT, Series, series_colour, series_for
from brim.units import (
    UNKNOWN,
    byte_unit,
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    listed,
    number,
    ratio_text,
    score_text,
    significant,
    text,
)

__all__ = ["FIGURES", "batch_gain_rows", "curve_row", "main_metric", "training_page"]

SAMPLES = Axis("samples seen", "span")
EPOCHS = Axis("epoch", "whole")
_LOSSES = (
    Series(label="training", colour=series_colour(0), bare=True),
    Series(label="validation", colour=series_colour(1), shape="square", dash=(6, 3)),
)
_SIZES = (
    Series(label="effective batch", colour=LIMIT, dash=(6, 4), bare=True, stepped=True),
    Series(label="micro-batch", colour=series_colour(0), bare=True, stepped=True),
)
_RATE_ROWS = 12  # of the table of learning rates


def _waited(summary: Mapping[str, Any]) -> float | None:
    waited, seconds = number(value_at(summary, "loader.wait_seconds")), number(summary.get("seconds"))
    return waited / seconds if waited is not None and seconds else None


def _idle_causes(value: object) -> str:
    """`loading 2.1 %, validation 0.4 %`; what is next to nothing is left out."""
    known = [(name, number(part)) for name, part in mapping(value).items()]
    return ", ".join(f"{name} {fraction_text(part)}" for name, part in known if part and part >= 0.0005) or UNKNOWN


FIGURES = (
    Figure("throughput (samples/s)", "samples_per_second", significant),
    Figure("throughput (pairs/s)", "pairs_per_second", significant),
    Figure("samples seen", "samples", count_text),
    Figure("optimizer steps", "steps", count_text),
    Figure("effective batch", "effective_batch_size", count_text),
    Figure("micro-batch", "micro_batch_size", count_text),
    Figure("micro-batches in a step", "accumulation_steps", count_text),
    Figure("batch beyond which samples stop helping", "noise_scale.useful_batch", count_text),
    Figure("largest micro-batch seen to fit", "batch_size_max", count_text),
    Figure("validation batch", "eval_batch_size", count_text),
    Figure("OOM events", "oom_events", count_text),
    Figure("allocator retries", "alloc_retries", count_text),
    Figure("peak allocated", "peak_allocated_bytes", bytes_text),
    Figure("peak reserved", "peak_reserved_bytes", bytes_text),
    Figure("GPU use (mean)", "gpu_utilisation_mean", fraction_text),
    Figure("device idle", "gpu_wait_fraction", fraction_text),
    Figure("device idle, by cause", "gpu_wait_causes", _idle_causes),
    Figure("waited for data", _waited, fraction_text),
    Figure("loading processes", "loader.num_workers", count_text),
    Figure("fast path", "fast_path", lambda value: text(value) if isinstance(value, str) else UNKNOWN),
    Figure("ranks", "ranks", count_text),
    Figure("time in steps", "seconds", duration_text),
    Figure("time in validation", "eval_seconds", duration_text),
)


def training_page(run: Run) -> Page:
    """Headline, loss, metrics, learning rate, sizes, noise scale, speed, seeds, machine, settings."""
    if is_preference(run):
        return preference_page(run)
    training = read_training(run)
    summary = training.summary
    seeds = summary.get("seeds")
    metrics = seed_rows(summary.get("metrics"), seeds if isinstance(seeds, list) else [])
    main = main_metric(metrics, value_at(run.request, "settings.training.monitor"))
    model, data = trained_on(run)
    micro = "Micro-batches of the run's own first windows: each was real work and counts."
    return Page(
        title=f"Training of {model}",
        subtitle=f"on {data}, {text(run.request.get('task'))}; {count_text(summary.get('samples'))} samples in "
        f"{run.duration}",
        headline=_headline(training, main),
        facts=_facts(summary, metrics, main),
        remarks=_remarks(summary),
        warnings=_warnings(training),
        sections=present(
            _loss_section(training),
            _metric_section(training),
            _rate_section(training),
            _size_section(training),
            _noise_section(training),
            _speed_section(training),
            _seed_section(metrics),
            runs_section(run),
            plan_section(run.plan, title="Micro-batch search", said=(micro,)),
            machine_section([("", run.trace())], limit_bytes=run.limit_bytes),
            note_section(summary.get("notes")),
            *_repeated(run),
        ),
    )


def main_metric(rows: Sequence[Mapping[str, Any]], monitor: object) -> Mapping[str, Any] | None:
    """The figure that the run goes by: the one asked for, else the first that is no loss, else a loss."""
    wanted = {"loss": "val_loss"}.get(str(monitor), str(monitor).removeprefix("val_") if monitor else "")
    by_name = {row["name"]: row for row in rows}
    scores = [row for row in rows if row["name"] not in ("train_loss", "val_loss")]
    last = by_name.get("val_loss") or by_name.get("train_loss")
    return by_name.get(wanted) or (scores[0] if scores else last)


def _headline(training: TrainingRun, main: Mapping[str, Any] | None) -> str:
    if main is None:
        return "No figure: no epoch was finished"
    seeds = len(main["values"])
    best, epochs = number(training.summary.get("best_epoch")), number(training.summary.get("epochs"))
    place = "" if best is None or not epochs else f" after epoch {count_text(best + 1)} of {count_text(epochs)}"
    over = f" over {plural(seeds, 'seed')}" if seeds > 1 else place
    return f"{main['name']}: {main['shown']}{over}"


def _facts(
    summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], main: Mapping[str, Any] | None
) -> tuple[Fact, ...]:
    others = [row for row in metrics if row is not main and row["name"] != "train_loss"]
    micro = summary.get("micro_batch_size")
    parts = f"{count_text(summary.get('accumulation_steps'))} × {count_text(micro)} samples"
    useful = number(value_at(summary, "noise_scale.useful_batch"))
    return facts(
        *(Fact(row["name"], row["shown"]) for row in others[:3]),
        Fact("throughput", f"{significant(summary.get('samples_per_second'))} samples/s"),
        Fact(
            "effective batch", count_text(summary.get("effective_batch_size")), "" if number(micro) is None else parts
        ),
        Fact("samples stop helping at", f"batch {count_text(useful)}") if useful is not None else None,
        Fact("reserved memory", bytes_text(summary.get("peak_reserved_bytes")), "peak"),
        Fact("GPU use", fraction_text(summary.get("gpu_utilisation_mean")), "mean"),
    )


def _remarks(summary: Mapping[str, Any]) -> tuple[str, ...]:
    epochs, events = (int(number(summary.get(name)) or 0) for name in ("epochs", "oom_events"))
    return present(
        f"Stopped early, after {plural(epochs, 'epoch')}: no gain." if summary.get("stopped_early") is True else None,
        f"Memory ran out {plural(events, 'time')}; the run continued in smaller micro-batches." if events else None,
    )


def _warnings(training: TrainingRun) -> tuple[str, ...]:
    errors = mapping(training.summary.get("errors"))
    name, why = next(iter(errors.items()), ("", ""))
    skipped, damaged = int(number(training.summary.get("skipped_steps")) or 0), training.damaged
    return present(
        f"{plural(len(errors), 'run')} failed, and the figures are without: {name}: {text(why)}" if errors else None,
        f"{plural(skipped, 'step')} had gradients that are not finite and left the weights as they were."
        if skipped
        else None,
        f"{plural(damaged, 'line')} of steps.jsonl could not be read." if damaged else None,
    )


def curve_row(x: float, y: float | None, line: str, show: Any = significant, *, label: str = "") -> dict[str, Any]:
    """A point of a curve."""
    return {"x": x, "y": y, "line": line, "label": label or count_text(x), "shown": show(y)}


def _loss_section(training: TrainingRun) -> Section:
    """Loss against samples: every step faint, its running mean, and the loss of each validation."""
    spans = [span for span in training.steps.spans if span.weight]
    means = smoothed(spans)
    rough = means if any(mean != span.loss for span, mean in means) else []  # of a few steps there is no running mean
    faint = [{**curve_row(span.samples, span.loss, "training"), "run": "training"} for span, _ in rough]
    rows = [curve_row(span.samples, mean, "training") for span, mean in means] + [
        curve_row(row["samples"], row["val_loss"], "validation")
        for row in training.epochs
        if row.get("val_loss") is not None and row.get("samples") is not None
    ]
    columns = (
        words("epoch", "label"), Column("steps", "step", count_text), Column("samples", "samples", count_text),
        Column("training loss", "train_loss", significant), Column("validation loss", "val_loss", significant),
    )  # fmt: skip
    table = PageTable("Loss by epoch", columns, training.epochs)
    if not rows:
        said: tuple[str, ...] = ("No step was recorded.",)
        return Section(title="Loss", paragraphs=said, table=table if training.epochs else None)
    each = "each step" if training.steps.num_steps == len(faint) else "a few neighbouring steps together"
    said = (f"Faint: the loss of {each}. Bold: its running mean over a twentieth of the run.",) if faint else ()
    behind = Marks(mark="faint", rows=faint)
    chart = line_chart("Loss against samples", rows, x=SAMPLES, y=Axis("loss"), series=_LOSSES, marked=[behind])
    return Section(title="Loss", paragraphs=said, charts=present(chart), table=table, open=len(table.rows) <= 5)


def _metric_section(training: TrainingRun) -> Section | None:
    """Every figure of validation by epoch; those between 0 and 1 share a chart."""
    names = figure_names(training.epochs)
    if not names:
        return None
    values = {name: [row[name] for row in training.epochs if row.get(name) is not None] for name in names}
    shared = [name for name in names if all(0 <= value <= 1 for value in values[name])]
    groups = ([shared] if shared else []) + [[name] for name in names if name not in shared]
    columns = (
        words("epoch", "label"),
        *(Column(title, name, score_text if name in shared else significant) for name, title in names.items()),
        Column("validation loss", "val_loss", significant),
        Column("training loss", "train_loss", significant),
    )
    best = next((row for row in training.epochs if row["best"]), None)
    return Section(
        title="Metrics by epoch",
        paragraphs=present(
            f"The best epoch is {count_text(best['epoch'])}: its weights are the best ones." if best else None
        ),
        charts=present(*(_metric_chart(training, {name: names[name] for name in group}) for group in groups)),
        table=PageTable("Validation by epoch", columns, training.epochs),
    )


def _metric_chart(training: TrainingRun, names: Mapping[str, str]) -> Chart | None:
    rows = [
        curve_row(row["epoch"], row[name], title, score_text if len(names) > 1 else significant)
        for name, title in names.items()
        for row in training.epochs
        if row.get(name) is not None
    ]
    title = f"{listed(list(names.values()))} on the validation data"
    return line_chart(title, rows, x=EPOCHS, y=Axis("figure", "score"), series=series_for(list(names.values())))


def _rate_section(training: TrainingRun) -> Section | None:
    """The learning rate of each step, and how it came about; one that never changes is a sentence, not a chart."""
    spans = [span for span in training.steps.spans if span.learning_rate is not None]
    if not spans:
        return None
    rows = [curve_row(span.samples, span.learning_rate, "learning rate") for span in spans]
    constant = len({row["shown"] for row in rows}) == 1
    chart = None
    if not constant:
        line = Series(label="learning rate", colour=series_colour(0), bare=True)
        chart = line_chart(
            "Learning rate against samples", rows, x=SAMPLES, y=Axis("learning rate", "zero"), series=[line]
        )
    every = max(len(spans) // _RATE_ROWS, 1)
    picked = [*spans[::every], *([spans[-1]] if (len(spans) - 1) % every else [])]
    columns = (
        Column("step", "step", count_text), Column("samples", "samples", count_text),
        Column("learning rate", "rate", significant), Column("effective batch", "batch", count_text),
    )  # fmt: skip
    tabled = [
        {"step": one.last_step, "samples": one.samples, "rate": one.learning_rate, "batch": one.effective_batch}
        for one in picked
    ]
    said = [*_rate_words(mapping(training.summary.get("learning_rate")))]
    said += [f"It is {rows[0]['shown']} from the first step to the last."] if constant else []
    return Section(
        title="Learning rate", paragraphs=tuple(said), charts=present(chart), open=False,
        table=PageTable("Learning rate along the run", columns, tabled),
    )  # fmt: skip


def _rate_words(rate: Mapping[str, Any]) -> list[str]:
    base, factor, batch = (number(rate.get(name)) for name in ("base", "factor", "base_batch"))
    if base is None:
        return []
    said = [f"Asked for: {significant(base)}."]
    if factor is not None and factor != 1:
        meant = "" if batch is None else f", chosen for a batch of {count_text(batch)},"
        rule = f"by the rule {rate.get('rule')} ({ratio_text(factor)})"
        said = [f"The {significant(base)} asked for{meant} became {significant(base * factor)} {rule}."]
    if warmup := number(rate.get("warmup_steps")):
        said.append(f"It rises over the first {plural(int(warmup), 'step')}.")
    return [" ".join(said)]


def _size_section(training: TrainingRun) -> Section | None:
    """The effective batch, the micro-batches it is cut into, and where memory ran out."""
    spans = [span for span in training.steps.spans if span.micro_high is not None]
    said = _size_words(training)
    if not spans:
        return Section(title="Batch and micro-batches", paragraphs=said) if said else None
    ends = (spans[0], spans[-1])
    rows = [
        curve_row(at, size, line.label, count_text)
        for line, field in zip(_SIZES, ("effective_batch", "micro_high"), strict=True)
        for span in spans
        if (size := getattr(span, field)) is not None
        for at in ((span.start_samples, span.samples) if span in ends else (span.start_samples,))
    ]
    failed = [
        {"x": one["samples"], "y": one["micro"], "label": count_text(one["samples"]), "reason": _event_words(one)}
        for one in training.steps.events
        if one["micro"] is not None
    ]
    counts = [
        curve_row(span.start_samples, span.accumulation, "count", count_text) for span in spans if span.accumulation
    ]
    out = [count_text(one["samples"]) for one in training.steps.events]
    columns = (
        words("steps", "span"), Column("from sample", "start_samples", count_text),
        Column("effective batch", "effective"), Column("micro-batch", "micro"),
        Column("micro-batches in a step", "accumulation"), Column("OOM events", "oom_events", count_text),
    )  # fmt: skip
    sizes = line_chart(
        "Effective batch and micro-batch (samples)", rows, x=SAMPLES, y=Axis("samples", "sizes"), series=_SIZES,
        marked=crosses(failed, "out of memory"), note=f"Memory ran out at {listed(out)} samples." if out else "",
    )  # fmt: skip
    accumulated = None
    if len({row["y"] for row in counts}) > 1:
        accumulated = line_chart(
            "Micro-batches in a step (accumulation)", counts, x=SAMPLES, y=Axis("micro-batches", "zero"),
            series=[Series(label="count", colour=series_colour(2), bare=True, stepped=True)],
        )  # fmt: skip
    table = PageTable("Batch and micro-batches along the run", columns, schedule_rows(spans))
    return Section(title="Batch and micro-batches", paragraphs=said, charts=present(sizes, accumulated), table=table)


def _event_words(event: Mapping[str, Any]) -> str:
    times = plural(event["times"], "time")
    return f"step {event['step']:,} ran out of memory {times}; redone with {count_text(event['micro'])} at most"


def _size_words(training: TrainingRun) -> tuple[str, ...]:
    summary, plan = training.summary, training.run.plan
    micro, count = number(summary.get("micro_batch_size")), number(summary.get("accumulation_steps"))
    first = present(
        f"{count_text(count)} × {count_text(micro)} samples make an optimizer step of "
        f"{count_text(summary.get('effective_batch_size'))}."
        if micro is not None and count is not None
        else None,
        f"{str(plan['reason'])[:1].upper()}{str(plan['reason'])[1:]}." if plan.get("reason") else None,
        f"The plan is a cap of {count_text(plan.get('size'))} tokens in a micro-batch, padding included."
        if plan.get("unit") == "tokens"
        else None,
    )
    events, total = training.steps.num_events, int(number(summary.get("oom_events")) or 0)
    said = [" ".join(first)] if first else []
    if events:
        said.append(
            f"Memory ran out {plural(events, 'time')} in training: each window was redone whole in smaller "
            "micro-batches, so that nothing was skipped and nothing counted twice."
        )
    if total > events:
        elsewhere = "in validation, or on other ranks" if number(summary.get("ranks")) != 1 else "in validation"
        said.append(f"It ran out {plural(total - events, 'time')} {elsewhere}.")
    said += [
        f"From sample {count_text(change.get('samples'))} on the effective batch is "
        f"{count_text(change.get('effective_batch'))}: noise scale {count_text(change.get('noise_scale'))}, "
        f"learning rate {significant(change.get('learning_rate'))}."
        for change in entries(summary.get("effective_batches"))
    ]
    return tuple(said)


def batch_gain_rows(noise_scale: float, batch: float) -> list[dict[str, Any]]:
    """What a step at other batches would bring, by the noise scale: 1/(1 + scale/batch) of an exact gradient's step.

    `samples` is how many samples the same progress takes, over what it takes at `batch`.
    """
    sizes = [(batch * factor, factor == 1.0) for factor in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
    return [
        {"batch": round(size), "used": used, "progress": size / (size + noise_scale),
         "samples": (size + noise_scale) / (batch + noise_scale)}
        for size, used in sizes
        if size >= 1
    ]  # fmt: skip


def _noise_section(training: TrainingRun) -> Section | None:
    """The gradient noise scale, and what another batch would bring by it."""
    noise = training.summary.get("noise_scale")
    if not isinstance(noise, dict):
        return None
    title = "Gradient noise scale"
    measured = plural(int(number(noise.get("measurements")) or 0), "measurement")
    scale, batch = number(noise.get("noise_scale")), number(training.summary.get("effective_batch_size"))
    if scale is None or batch is None:
        return Section(title=title, paragraphs=(f"Not known: {measured}, too few or too noisy for a figure.",))
    gain = batch_gain_rows(scale, batch)
    used, twice = (next(row for row in gain if row["batch"] == round(batch * by)) for by in (1, 2))
    columns = (
        Column("batch", "batch", count_text), words("this run", "used"),
        Column("progress of a step", "progress", fraction_text),
        Column("samples for the same progress", "samples", ratio_text),
    )  # fmt: skip
    known = (
        f"More samples in a step stop helping beyond a batch of about {count_text(noise.get('useful_batch'))} "
        f"({measured}). At this run's {count_text(batch)} a step brings {fraction_text(used['progress'])} of what "
        f"one with an exact gradient would; at twice the batch {fraction_text(twice['progress'])}, for "
        f"{ratio_text(twice['samples'])} the samples."
    )
    return Section(
        title=title,
        paragraphs=(
            known,
            "The scale is an average over the last part of the run; it usually grows as the loss falls.",
        ),
        table=PageTable("What another batch would bring, computed from the noise scale: not measured", columns, gain),
    )


def _speed_section(training: TrainingRun) -> Section | None:
    """Samples per second and reserved memory by epoch, and every figure of speed and memory."""
    table = figure_table("Speed and memory", FIGURES, [training.summary])
    if not table.rows:
        return None
    rates = [
        curve_row(row["epoch"], row["samples_per_second"], "rate")
        for row in training.epochs
        if row.get("samples_per_second") is not None
    ]
    peaks = [(row["epoch"], row["peak_reserved_bytes"]) for row in training.epochs if row.get("peak_reserved_bytes")]
    limit, most = training.run.limit_bytes, max((size for _, size in peaks), default=0.0)
    near = limit if limit is not None and limit <= 4 * most else None  # a far limit would flatten the curve
    unit = byte_unit([most, near])
    used: list[Row] = [
        {**curve_row(epoch, size / unit.size, "reserved"), "shown": bytes_text(size)} for epoch, size in peaks
    ]
    speed = line_chart("Throughput by epoch (samples/s)", rates if len(rates) > 1 else [], x=EPOCHS, y=Axis("", "zero"))
    memory = line_chart(
        f"Peak reserved memory by epoch ({unit.name})", used if len(used) > 1 else [], x=EPOCHS,
        y=Axis("", "zero"), marked=[limit_line(unit.of(near))],
        note="" if limit is None else f"The memory limit is {bytes_text(limit)}.",
    )  # fmt: skip
    return Section(title="Speed and memory", charts=present(speed, memory), table=table, open=True)


def _seed_section(metrics: Sequence[Mapping[str, Any]]) -> Section | None:
    """Each seed's figures, where there is more than one."""
    several = [row for row in metrics if len(row["values"]) > 1]
    if not several:
        return None
    shared = [row for row in several if all(value is not None and 0 <= value <= 1 for value in row["values"])]
    drawn = [{**row, "line": "run", "x": row["mean"], **interval_ends(row["mean"], row["deviation"])} for row in shared]
    seeds = [name for name in several[0] if name.startswith("seed ")]
    strokes = [
        {"name": row["name"], "line": "run", "x": row[seed], "seed": seed.removeprefix("seed "),
         "shown": significant(row[seed])}
        for row in shared
        for seed in seeds
        if row.get(seed) is not None
    ]  # fmt: skip
    chart = category_chart(
        "Mean and deviation over seeds", drawn, x=Axis("figure", "score"), what="metric", strokes=strokes
    )
    columns = (
        words("metric", "name"), Column("mean", "mean", significant), Column("deviation", "deviation", significant),
        *(Column(seed, seed, significant) for seed in seeds),
    )  # fmt: skip
    return Section(title="Seeds", charts=present(chart), table=PageTable("Figures of each seed", columns, several))


def _repeated(run: Run) -> tuple[Section, ...]:
    """How to repeat it; a run that Python began has no command, but perhaps a file."""
    if isinstance(run.request.get("argv"), list):
        return repeat_sections(run)
    file = run.request.get("file")
    if file:
        command = f"brim train {shlex.quote(str(file))}"
        return repeat_sections(run, command=command, source="Started from Python; the same from its file:")
    return repeat_sections(
        run, command="brim.train(settings)", source="Started from Python, with the settings of the table:"
    )
