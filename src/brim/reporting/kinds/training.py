"""The page of a training: what it came to, how the loss fell, and at which batch, rate, speed and memory.

Preference training has tables instead of epochs and a page of its own (`preference.py`).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.spreads import draw_spreads
from brim.reporting.charts.theme import Line, series_colour
from brim.reporting.kinds.preference import preference_page
from brim.reporting.kinds.training_figures import (
    learning_rate_section,
    loss_section,
    metric_section,
    noise_section,
    size_section,
    speed_section,
)
from brim.reporting.kinds.training_seeds import runs_section
from brim.reporting.read import Run
from brim.reporting.rows.probes import probe_rows, probes_of
from brim.reporting.rows.training import main_metric, seed_rows
from brim.reporting.sections.machine import machine_section
from brim.reporting.sections.search import plan_section
from brim.reporting.sections.settings import settings_sections
from brim.reporting.training_run import TrainingRun, is_preference, read_training, subject_of
from brim.reporting.units import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    number,
    significant,
    text,
)

__all__ = ["spread_text", "training_figures", "training_page"]


def training_page(run: Run) -> Page:
    """Headline, loss, metrics, learning rate, sizes, noise scale, speed, seeds, machine, settings."""
    if is_preference(run):
        return preference_page(run)
    training = read_training(run)
    summary = training.summary
    seeds = summary.get("seeds")
    metrics = seed_rows(summary.get("metrics"), seeds if isinstance(seeds, list) else [])
    main = main_metric(metrics, _monitor(run))
    sections = [
        loss_section(training),
        metric_section(training),
        learning_rate_section(training),
        size_section(training),
        noise_section(training),
        speed_section(training, training_figures(summary)),
        _seed_section(metrics),
        runs_section(run),
        _search_section(run),
        machine_section([("", run.trace())], limit_bytes=training.limit_bytes),
        _notes(summary),
        *_repeated(run),
    ]
    model, data = subject_of(run)
    return Page(
        title=f"Training of {model}",
        subtitle=f"on {data}, {text(run.request.get('task'))}; {count_text(summary.get('samples'))} samples in "
        f"{duration_text(run.document.get('duration_seconds'))}",
        headline=_headline(training, main),
        facts=_facts(summary, metrics, main),
        remarks=_remarks(training),
        warnings=_warnings(training),
        sections=tuple(section for section in sections if section is not None),
    )


def _monitor(run: Run) -> object:
    settings = run.request.get("settings")
    training = settings.get("training") if isinstance(settings, dict) else None
    return training.get("monitor") if isinstance(training, dict) else None


def spread_text(mean: object, deviation: object) -> str:
    """A figure over seeds: `0.820 ± 0.012`; of one seed the figure alone."""
    return significant(mean) if number(deviation) is None else f"{significant(mean)} ± {significant(deviation)}"


def _headline(training: TrainingRun, main: Mapping[str, Any] | None) -> str:
    if main is None:
        return "No figure: no epoch was finished"
    seeds = len(main["values"])
    if seeds > 1:
        return f"{main['name']}: {spread_text(main['mean'], main['deviation'])} over {plural(seeds, 'seed')}"
    best, epochs = number(training.summary.get("best_epoch")), number(training.summary.get("epochs"))
    place = "" if best is None or not epochs else f" after epoch {count_text(best + 1)} of {count_text(epochs)}"
    return f"{main['name']}: {spread_text(main['mean'], main['deviation'])}{place}"


def _facts(
    summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], main: Mapping[str, Any] | None
) -> tuple[Fact, ...]:
    others = [row for row in metrics if row is not main and row["name"] != "train_loss"]
    facts = [Fact(name=row["name"], value=spread_text(row["mean"], row["deviation"])) for row in others[:3]]
    if number(summary.get("samples_per_second")) is not None:
        facts.append(Fact(name="throughput", value=f"{significant(summary.get('samples_per_second'))} samples/s"))
    micro, count = summary.get("micro_batch_size"), summary.get("accumulation_steps")
    parts = "" if number(micro) is None else f"{count_text(count)} × {count_text(micro)} samples"
    if number(summary.get("effective_batch_size")) is not None:
        facts.append(Fact(name="effective batch", value=count_text(summary.get("effective_batch_size")), note=parts))
    noise = summary.get("noise_scale")
    if isinstance(noise, dict) and number(noise.get("useful_batch")) is not None:
        facts.append(Fact(name="samples stop helping at", value=f"batch {count_text(noise.get('useful_batch'))}"))
    if number(summary.get("peak_reserved_bytes")) is not None:
        facts.append(Fact(name="reserved memory", value=bytes_text(summary.get("peak_reserved_bytes")), note="peak"))
    if number(summary.get("gpu_utilisation_mean")) is not None:
        facts.append(Fact(name="GPU use", value=fraction_text(summary.get("gpu_utilisation_mean")), note="mean"))
    return tuple(facts)


def _remarks(training: TrainingRun) -> tuple[str, ...]:
    summary, told = training.summary, []
    if summary.get("stopped_early") is True:
        told.append(f"Stopped early, after {plural(int(number(summary.get('epochs')) or 0), 'epoch')}: no gain.")
    if events := int(number(summary.get("oom_events")) or 0):
        told.append(f"Memory ran out {plural(events, 'time')}; the run went on in smaller micro-batches.")
    return tuple(told)


def _warnings(training: TrainingRun) -> tuple[str, ...]:
    told = []
    errors = training.summary.get("errors")
    if isinstance(errors, dict) and errors:
        name, why = next(iter(errors.items()))
        told.append(f"{plural(len(errors), 'run')} failed, and the figures are without: {name}: {text(why)}")
    if skipped := int(number(training.summary.get("skipped_steps")) or 0):
        told.append(f"{plural(skipped, 'step')} had gradients that are no numbers and left the weights as they were.")
    if training.damaged:
        told.append(f"{plural(training.damaged, 'line')} of steps.jsonl could not be read.")
    return tuple(told)


def training_figures(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Speed, sizes and memory, named and written out; what is not known is left out."""
    loader = summary.get("loader")
    loader = loader if isinstance(loader, dict) else {}
    waited, seconds = number(loader.get("wait_seconds")), number(summary.get("seconds"))
    path = summary.get("fast_path")
    figures = (
        ("throughput", f"{significant(summary.get('samples_per_second'))} samples/s"),
        ("samples seen", count_text(summary.get("samples"))),
        ("optimizer steps", count_text(summary.get("steps"))),
        ("effective batch", count_text(summary.get("effective_batch_size"))),
        ("micro-batch", count_text(summary.get("micro_batch_size"))),
        ("micro-batches in a step", count_text(summary.get("accumulation_steps"))),
        ("largest micro-batch seen to fit", count_text(summary.get("batch_size_max"))),
        ("validation batch", count_text(summary.get("eval_batch_size"))),
        ("OOM events", count_text(summary.get("oom_events"))),
        ("allocator retries", count_text(summary.get("alloc_retries"))),
        ("peak allocated", bytes_text(summary.get("peak_allocated_bytes"))),
        ("peak reserved", bytes_text(summary.get("peak_reserved_bytes"))),
        ("GPU use (mean)", fraction_text(summary.get("gpu_utilisation_mean"))),
        ("waited for data", fraction_text(waited / seconds) if waited is not None and seconds else UNKNOWN),
        ("loading processes", count_text(loader.get("num_workers"))),
        ("fast path", text(path) if isinstance(path, str) else UNKNOWN),
        ("ranks", count_text(summary.get("ranks"))),
        ("time in steps", duration_text(seconds)),
        ("time in validation", duration_text(summary.get("eval_seconds"))),
    )
    return [{"name": name, "value": value} for name, value in figures if not value.startswith(UNKNOWN)]


def _seed_section(metrics: Sequence[Mapping[str, Any]]) -> Section | None:
    """Each seed's figures, where there is more than one."""
    several = [row for row in metrics if len(row["values"]) > 1]
    if not several:
        return None
    line = Line(label="run", colour=series_colour(0))
    shared = [row for row in several if all(value is not None and 0 <= value <= 1 for value in row["values"])]
    panels = []
    if shared:
        drawn = [
            {
                "name": row["name"],
                "line": "run",
                "x": row["mean"],
                "low": None,
                "high": None,
                **_ends(row["mean"], row["deviation"]),
                "shown": spread_text(row["mean"], row["deviation"]),
            }
            for row in shared
        ]
        dots = [
            {"name": row["name"], "line": "run", "x": value, "seed": name.removeprefix("seed "),
             "shown": significant(value)}
            for row in shared
            for name, value in row.items()
            if name.startswith("seed ") and value is not None
        ]  # fmt: skip
        words = "; ".join(f"{row['name']} {row['shown']}" for row in drawn)
        panels.append(
            Panel(
                title="Mean and deviation over seeds",
                spec=draw_spreads(drawn, dots, lines=[line], x_title="figure", what="metric"),
                alternative=f"Over {len(several[0]['values'])} seeds: {words}. A stroke is a seed.",
            )
        )
    seeds = [name for name in several[0] if name.startswith("seed ")]
    columns = (
        Column(title="metric", field="name", words=True),
        Column(title="mean", field="mean", show=significant),
        Column(title="deviation", field="deviation", show=significant),
        *(Column(title=seed, field=seed, show=significant) for seed in seeds),
    )
    table = Table(caption="Figures of each seed", columns=columns, rows=several)
    return Section(title="Seeds", panels=tuple(panels), table=table, table_open=not panels)


def _ends(mean: float, deviation: float | None) -> dict[str, float]:
    return {} if deviation is None else {"low": mean - deviation, "high": mean + deviation}


def _search_section(run: Run) -> Section | None:
    """The sizes tried; only those charts that have something to show: without a meter there is no memory to draw."""
    section = plan_section(run.plan)
    if section is None:
        return None
    rows = probe_rows(probes_of(run.plan))
    known = {"Throughput": any(row["rate"] is not None for row in rows)}
    known["Reserved"] = any(row["drawn_bytes"] is not None for row in rows)
    panels = tuple(panel for panel in section.panels if known.get(panel.title.split()[0], True))
    said = ("Micro-batches of the run's own first windows: each was real work and counts.",)
    return dataclasses.replace(
        section, title="Micro-batch search", paragraphs=said, panels=panels, table_open=not panels
    )


def _notes(summary: Mapping[str, Any]) -> Section | None:
    notes = summary.get("notes")
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return Section(title="Notes", points=lines) if lines else None


def _repeated(run: Run) -> tuple[Section, ...]:
    """How to repeat it; a run that Python began has no command, but perhaps a file."""
    sections = settings_sections(run)
    if isinstance(run.request.get("argv"), list):
        return sections
    file = run.request.get("file")
    command = f"brim train {shlex.quote(str(file))}" if file else "brim.fit(settings)"
    said = (
        "Begun from Python; the same from its file:" if file else "Begun from Python, with the settings of the table:"
    )
    first = dataclasses.replace(sections[0], paragraphs=(sections[0].paragraphs[0], said), command=command)
    return (first, *sections[1:])
