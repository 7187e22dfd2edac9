"""The figures of a training's page: loss, metrics by epoch, learning rate, sizes, noise scale, speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Key, Panel, Section, Table
from brim.reporting.charts.curves import curve_key, draw_curves
from brim.reporting.charts.theme import BAD, LIMIT, Line, lines_for, series_colour
from brim.reporting.rows.training import batch_gain_rows, figure_names, schedule_rows, smoothed
from brim.reporting.training_run import TrainingRun
from brim.reporting.units import (
    byte_unit,
    bytes_text,
    count_text,
    fraction_text,
    number,
    ratio_text,
    score_text,
    significant,
)
from brim.reporting.wording import listed, trend_words

__all__ = [
    "LOSS_LINES", "learning_rate_section", "loss_section", "metric_section", "noise_section", "size_section",
    "speed_section",
]  # fmt: skip

TRAINING, VALIDATION = "training", "validation"
LOSS_LINES = (
    Line(label=TRAINING, colour=series_colour(0), bare=True),
    Line(label=VALIDATION, colour=series_colour(1), shape="square", dash=(6, 3)),
)
SAMPLES = "samples seen"
_RATE_ROWS = 12  # of the table of learning rates
_EPOCH = Column(title="epoch", field="label", words=True)


def loss_section(training: TrainingRun) -> Section:
    """Loss against samples: every step faint, its running mean, and the loss of each validation."""
    spans = [span for span in training.steps.spans if span.weight]
    means = smoothed(spans)
    rows = [_at(span.samples, mean, TRAINING, significant) for span, mean in means]
    rough = means if any(mean != span.loss for span, mean in means) else []  # of a few steps there is no running mean
    fine = [_at(span.samples, span.loss, TRAINING, significant) for span, _ in rough]
    held_out = [
        _at(row["samples"], row["val_loss"], VALIDATION, significant)
        for row in training.epochs
        if row.get("val_loss") is not None and row.get("samples") is not None
    ]
    columns = (
        _EPOCH,
        Column(title="steps", field="step", show=count_text),
        Column(title="samples", field="samples", show=count_text),
        Column(title="training loss", field="train_loss", show=significant),
        Column(title="validation loss", field="val_loss", show=significant),
    )
    table = Table(caption="Loss by epoch", columns=columns, rows=training.epochs).known()
    if not rows and not held_out:
        said = ("No step was recorded.",)
        return Section(title="Loss", paragraphs=said, table=table if training.epochs else None, table_open=True)
    lines = [line for line in LOSS_LINES if any(row["line"] == line.label for row in [*rows, *held_out])]
    words = [f"training loss {_course([(span.samples, mean) for span, mean in means])}"] if means else []
    if held_out:
        words.append(f"validation loss {_course([(row['x'], row['y']) for row in held_out])}")
    panel = Panel(
        title="Loss against samples",
        spec=draw_curves([*rows, *held_out], lines=lines, x_title=SAMPLES, title="loss", fine=fine),
        alternative=f"{'; '.join(words).capitalize()}.",
        keys=tuple(curve_key(line, points=line.label == VALIDATION) for line in lines),
    )
    told = []
    if fine:
        each = "each step" if training.steps.num_steps == len(fine) else "a few neighbouring steps together"
        told.append(f"Faint: the loss of {each}. Bold: its running mean over a twentieth of the run.")
    return Section(title="Loss", paragraphs=tuple(told), panels=(panel,), table=table, table_open=len(table.rows) <= 5)


def _at(x: float, y: float | None, line: str, show: Callable[[object], str], *, what: str = "") -> dict[str, Any]:
    return {"x": x, "y": y, "line": line, "label": what or count_text(x), "shown": show(y)}


def _course(figures: Sequence[tuple[float, float | None]]) -> str:
    """The first and the last figure of a curve, and what lies beyond them."""
    return trend_words([(f"{count_text(samples)} samples", figure) for samples, figure in figures], significant)


def metric_section(training: TrainingRun) -> Section | None:
    """Every figure of validation by epoch; those between 0 and 1 share a chart."""
    names = figure_names(training.epochs)
    if not names:
        return None
    values = {name: [row[name] for row in training.epochs if row.get(name) is not None] for name in names}
    shared = [name for name in names if all(0 <= value <= 1 for value in values[name])]
    groups = ([shared] if shared else []) + [[name] for name in names if name not in shared]
    panels = tuple(_metric_panel(training, {name: names[name] for name in group}) for group in groups)
    shown = {name: score_text if name in shared else significant for name in names}
    columns = (
        _EPOCH,
        *(Column(title=title, field=name, show=shown[name]) for name, title in names.items()),
        Column(title="validation loss", field="val_loss", show=significant),
        Column(title="training loss", field="train_loss", show=significant),
    )
    best = next((row for row in training.epochs if row["best"]), None)
    said = () if best is None else (f"The best epoch is {count_text(best['epoch'])}: its weights are the best ones.",)
    return Section(
        title="Metrics by epoch",
        paragraphs=said,
        panels=panels,
        table=Table(caption="Validation by epoch", columns=columns, rows=training.epochs).known(),
    )


def _metric_panel(training: TrainingRun, names: Mapping[str, str]) -> Panel:
    lines = lines_for(list(names.values()))
    show = score_text if len(names) > 1 else significant
    rows = [
        _at(row["epoch"], row[name], title, show)
        for name, title in names.items()
        for row in training.epochs
        if row.get(name) is not None
    ]
    words = [f"{title} {_by_epoch([row for row in rows if row['line'] == title], show)}" for title in names.values()]
    return Panel(
        title=f"{listed(list(names.values()))} on the validation data",
        spec=draw_curves(rows, lines=lines, x_title="epoch", title="figure", whole=True),
        alternative=f"{'; '.join(words)}.",
        keys=tuple(line.key() for line in lines) if len(lines) > 1 else (),
    )


def learning_rate_section(training: TrainingRun) -> Section | None:
    """The learning rate of each step, and how it came about."""
    spans = [span for span in training.steps.spans if span.learning_rate is not None]
    if not spans:
        return None
    line = Line(label="learning rate", colour=series_colour(0), bare=True)
    rows = [_at(span.samples, span.learning_rate, line.label, significant) for span in spans]
    course = _course([(span.samples, span.learning_rate) for span in spans])
    every = max(len(spans) // _RATE_ROWS, 1)
    picked = [*spans[::every], *([spans[-1]] if (len(spans) - 1) % every else [])]
    columns = (
        Column(title="step", field="step", show=count_text),
        Column(title="samples", field="samples", show=count_text),
        Column(title="learning rate", field="rate", show=significant),
        Column(title="effective batch", field="batch", show=count_text),
    )
    tabled = [
        {"step": one.last_step, "samples": one.samples, "rate": one.learning_rate, "batch": one.effective_batch}
        for one in picked
    ]
    return Section(
        title="Learning rate",
        paragraphs=_rate_words(training.summary.get("learning_rate")),
        panels=(
            Panel(
                title="Learning rate against samples",
                spec=draw_curves(rows, lines=[line], x_title=SAMPLES, title="learning rate", vertical="amount"),
                alternative=f"Learning rate {course}.",
            ),
        ),
        table=Table(caption="Learning rate along the run", columns=columns, rows=tabled),
    )


def _rate_words(told: object) -> tuple[str, ...]:
    if not isinstance(told, dict) or number(told.get("base")) is None:
        return ()
    base, factor = number(told.get("base")), number(told.get("factor"))
    words = [f"Asked for: {significant(base)}."]
    if base is not None and factor is not None and factor != 1:
        batch = number(told.get("base_batch"))
        meant = "" if batch is None else f", chosen for a batch of {count_text(batch)},"
        rule = f"by the rule {told.get('rule')} ({ratio_text(factor)})"
        words = [f"The {significant(base)} asked for{meant} became {significant(base * factor)} {rule}."]
    if number(told.get("warmup_steps")):
        words.append(f"It rises over the first {plural(int(told['warmup_steps']), 'step')}.")
    return (" ".join(words),)


def size_section(training: TrainingRun) -> Section | None:
    """The effective batch, the micro-batches it is cut into, and where memory ran out."""
    spans = [span for span in training.steps.spans if span.micro_high is not None]
    columns = (
        Column(title="steps", field="span", words=True),
        Column(title="from sample", field="start_samples", show=count_text),
        Column(title="effective batch", field="effective"),
        Column(title="micro-batch", field="micro"),
        Column(title="micro-batches in a step", field="accumulation"),
        Column(title="OOM events", field="oom_events", show=count_text),
    )
    table = Table(caption="Batch and micro-batches along the run", columns=columns, rows=schedule_rows(spans))
    said = _size_words(training)
    if not spans:
        return Section(title="Batch and micro-batches", paragraphs=said) if said else None
    lines = (
        Line(label="effective batch", colour=LIMIT, shape="square", dash=(6, 4), bare=True),
        Line(label="micro-batch", colour=series_colour(0), bare=True),
    )
    rows = [
        _at(place, size, line.label, count_text)
        for line, field in zip(lines, ("effective_batch", "micro_high"), strict=True)
        for span in spans
        if (size := getattr(span, field)) is not None
        for place in ((span.start_samples, span.samples) if span in (spans[0], spans[-1]) else (span.start_samples,))
    ]
    failed = [
        {"x": one["samples"], "y": one["micro"], "label": count_text(one["samples"]), "reason": _event_words(one)}
        for one in training.steps.events
        if one["micro"] is not None
    ]
    counts = [_at(span.start_samples, span.accumulation, "count", count_text) for span in spans if span.accumulation]
    keys = tuple(curve_key(line, points=False) for line in lines)
    crossed = (Key(label="out of memory", colour=BAD, mark="cross"),) if failed else ()
    course = trend_words([(f"{count_text(span.samples)} samples", span.micro_high) for span in spans], count_text)
    events = f" Memory ran out at {listed([count_text(one['samples']) for one in training.steps.events])} samples."
    panels = [
        Panel(
            title="Effective batch and micro-batch (samples)",
            spec=draw_curves(
                rows, lines=lines, x_title=SAMPLES, title="samples", vertical="sizes", failed=failed, stepped=True
            ),
            alternative=f"Micro-batch {course}.{events if training.steps.events else ''}",
            keys=(*keys, *crossed),
        )
    ]
    if len({row["y"] for row in counts}) > 1:
        line = Line(label="count", colour=series_colour(2), bare=True)
        spread = trend_words([(f"{row['label']} samples", row["y"]) for row in counts], count_text)
        panels.append(
            Panel(
                title="Micro-batches in a step (accumulation)",
                spec=draw_curves(
                    counts, lines=[line], x_title=SAMPLES, title="micro-batches", vertical="amount", stepped=True
                ),
                alternative=f"Micro-batches in a step: {spread}.",
            )
        )
    return Section(title="Batch and micro-batches", paragraphs=said, panels=tuple(panels), table=table)


def _event_words(event: Mapping[str, Any]) -> str:
    times = plural(event["times"], "time")
    return f"step {event['step']:,} ran out of memory {times}; redone with {count_text(event['micro'])} at most"


def _size_words(training: TrainingRun) -> tuple[str, ...]:
    summary, plan = training.summary, training.run.plan
    micro, count = number(summary.get("micro_batch_size")), number(summary.get("accumulation_steps"))
    words = []
    if micro is not None and count is not None:
        words.append(
            f"{count_text(count)} × {count_text(micro)} samples make an optimizer step of "
            f"{count_text(summary.get('effective_batch_size'))}."
        )
    if plan.get("reason"):
        words.append(f"{str(plan['reason'])[:1].upper()}{str(plan['reason'])[1:]}.")
    if plan.get("unit") == "tokens":
        words.append(f"The plan is a cap of {count_text(plan.get('size'))} tokens in a micro-batch, padding included.")
    said = [" ".join(words)] if words else []
    events, total = training.steps.num_events, int(number(summary.get("oom_events")) or 0)
    if events:
        said.append(
            f"Memory ran out {plural(events, 'time')} in training: each window was redone whole in smaller "
            "micro-batches, so that nothing was skipped and nothing counted twice."
        )
    if total > events:
        elsewhere = "in validation, or on other ranks" if number(summary.get("ranks")) != 1 else "in validation"
        said.append(f"It ran out {plural(total - events, 'time')} {elsewhere}.")
    changes = summary.get("effective_batches")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, dict):
            said.append(
                f"From sample {count_text(change.get('samples'))} on the effective batch is "
                f"{count_text(change.get('effective_batch'))}: noise scale {count_text(change.get('noise_scale'))}, "
                f"learning rate {significant(change.get('learning_rate'))}."
            )
    return tuple(said)


def noise_section(training: TrainingRun) -> Section | None:
    """The gradient noise scale, and what another batch would bring by it."""
    told = training.summary.get("noise_scale")
    if not isinstance(told, dict):
        return None
    title = "Gradient noise scale"
    measured = plural(int(number(told.get("measurements")) or 0), "measurement")
    scale, batch = number(told.get("noise_scale")), number(training.summary.get("effective_batch_size"))
    if scale is None or batch is None:
        return Section(title=title, paragraphs=(f"Not known: {measured}, too few or too noisy for a figure.",))
    useful = number(told.get("useful_batch"))
    words = f"More samples in a step stop helping beyond a batch of about {count_text(useful)} ({measured}). "
    gain = batch_gain_rows(scale, batch)
    used, twice = (next(row for row in gain if row["batch"] == round(batch * by)) for by in (1, 2))
    words += (
        f"At this run's {count_text(batch)} a step brings {fraction_text(used['progress'])} of what one with an exact "
        f"gradient would; at twice the batch {fraction_text(twice['progress'])}, for {ratio_text(twice['samples'])} "
        "the samples."
    )
    columns = (
        Column(title="batch", field="batch", show=count_text),
        Column(title="this run", field="used", words=True),
        Column(title="progress of a step", field="progress", show=fraction_text),
        Column(title="samples for the same progress", field="samples", show=ratio_text),
    )
    caption = "What another batch would bring, computed from the noise scale: not measured"
    return Section(
        title=title,
        paragraphs=(
            words,
            "The scale is an average over the last part of the run; it usually grows as the loss falls.",
        ),
        table=Table(caption=caption, columns=columns, rows=gain),
        table_open=True,
    )


def speed_section(training: TrainingRun, figures: Sequence[Mapping[str, str]]) -> Section | None:
    """Samples per second and reserved memory by epoch, and every figure of speed and memory."""
    epochs, limit = training.epochs, training.limit_bytes
    if not figures:
        return None
    panels = []
    rates = [_at(row["epoch"], row["samples_per_second"], "rate", significant) for row in epochs
             if row.get("samples_per_second") is not None]  # fmt: skip
    if len(rates) > 1:
        line = Line(label="rate", colour=series_colour(0))
        panels.append(
            Panel(
                title="Throughput by epoch (samples/s)",
                spec=draw_curves(
                    rates, lines=[line], x_title="epoch", title="samples/s", vertical="amount", whole=True
                ),
                alternative=f"Samples per second {_by_epoch(rates, significant)}.",
            )
        )
    peaks = [(row["epoch"], row["peak_reserved_bytes"]) for row in epochs if row.get("peak_reserved_bytes")]
    if len(peaks) > 1:
        panels.append(_memory_panel(peaks, limit))
    named = (Column(title="figure", field="name", words=True), Column(title="value", field="value", words=True))
    table = Table(caption="Speed and memory", columns=named, rows=figures)
    return Section(title="Speed and memory", panels=tuple(panels), table=table, table_open=True)


def _memory_panel(peaks: Sequence[tuple[float, float]], limit: float | None) -> Panel:
    most = max(size for _, size in peaks)
    near = limit if limit is not None and limit <= 4 * most else None  # a far limit would flatten the curve
    unit = byte_unit([most, near])
    line = Line(label="reserved", colour=series_colour(0))
    rows = [
        {"x": epoch, "y": size / unit.size, "line": "reserved", "label": count_text(epoch), "shown": bytes_text(size)}
        for epoch, size in peaks
    ]
    course = trend_words([(f"epoch {count_text(epoch)}", size) for epoch, size in peaks], bytes_text)
    against = "" if limit is None else f"; the memory limit is {bytes_text(limit)}"
    return Panel(
        title=f"Peak reserved memory by epoch ({unit.name})",
        spec=draw_curves(
            rows, lines=[line], x_title="epoch", title="reserved", vertical="amount", limit=unit.of(near), whole=True
        ),
        alternative=f"Reserved memory {course}{against}.",
        keys=(line.key(), Key(label="memory limit", colour=LIMIT, mark="dashed")) if near is not None else (),
    )


def _by_epoch(rows: Sequence[Mapping[str, Any]], show: Callable[[object], str]) -> str:
    return trend_words([(f"epoch {row['label']}", row["y"]) for row in rows], show)
