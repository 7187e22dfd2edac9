"""The page of an evaluation: metrics, the scores behind them, speed, the machine, failures and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.bars import draw_counts, draw_histogram
from brim.reporting.charts.intervals import draw_intervals
from brim.reporting.charts.theme import Line, series_colour
from brim.reporting.read import Run
from brim.reporting.rows.evaluation import SampleDigest, batch_rows, digest_samples, metric_rows, score_rows
from brim.reporting.sections.machine import machine_section
from brim.reporting.sections.search import plan_section
from brim.reporting.sections.settings import settings_sections
from brim.reporting.units import (
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    number,
    score_text,
    significant,
    text,
)

__all__ = ["evaluation_page", "figure_rows"]

_NAMED = (Column(title="figure", field="name", words=True), Column(title="value", field="value", words=True))


def evaluation_page(run: Run) -> Page:
    """Headline, metrics, speed, machine, samples, settings."""
    summary, samples = run.summary, run.samples()
    digest = digest_samples(samples)
    metrics = metric_rows(summary)
    memory = run.plan.get("memory")
    limit = number(memory.get("limit_bytes")) if isinstance(memory, dict) else None
    sections = [
        _metric_section(metrics, digest),
        _speed_section(run, digest),
        plan_section(run.plan),
        machine_section([("", run.trace())], limit_bytes=limit),
        _failure_section(digest),
        _example_section(digest),
        _notes(summary),
        *settings_sections(run),
    ]
    count = number(summary.get("num_samples"))
    return Page(
        title=f"Evaluation of {text(run.request.get('model'))}",
        subtitle=f"on {text(run.request.get('data'))}, task {text(run.request.get('task'))}; "
        f"{count_text(count)} samples in {duration_text(run.document.get('duration_seconds'))}",
        headline=f"{metrics[0]['name']}: {metrics[0]['shown']}" if metrics else "No metric: the data has no references",
        facts=_facts(summary, metrics),
        warnings=_warnings(summary, samples.damaged),
        sections=tuple(section for section in sections if section is not None),
    )


def _facts(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    facts = [Fact(name=row["name"], value=row["shown"]) for row in metrics[1:4]]
    facts.append(Fact(name="throughput", value=f"{significant(summary.get('samples_per_second'))} samples/s"))
    sizes = summary.get("batch_sizes")
    spread = ""
    if isinstance(sizes, dict) and sizes.get("smallest") != sizes.get("largest"):
        spread = f"from {count_text(sizes.get('smallest'))} to {count_text(sizes.get('largest'))}"
    facts.append(Fact(name="batch size", value=count_text(summary.get("batch_size_used")), note=spread))
    if number(summary.get("peak_reserved_bytes")) is not None:
        facts.append(Fact(name="reserved memory", value=bytes_text(summary.get("peak_reserved_bytes")), note="peak"))
    if number(summary.get("gpu_utilisation_mean")) is not None:
        facts.append(Fact(name="GPU use", value=fraction_text(summary.get("gpu_utilisation_mean")), note="mean"))
    return tuple(facts)


def _warnings(summary: Mapping[str, Any], damaged: int) -> tuple[str, ...]:
    told = []
    if failed := int(number(summary.get("num_failed")) or 0):
        told.append(f"{plural(failed, 'sample')} failed and count as wrong.")
    if bad := int(number(summary.get("num_bad_records")) or 0):
        told.append(f"{plural(bad, 'record')} could not be read and were left out.")
    if damaged:
        told.append(f"{plural(damaged, 'line')} of samples.jsonl could not be read.")
    return tuple(told)


def _metric_section(metrics: Sequence[Mapping[str, Any]], digest: SampleDigest) -> Section | None:
    if not metrics:
        return None
    line = Line(label="run", colour=series_colour(0))
    shared = [{**row, "line": "run", "x": row["value"]} for row in metrics if 0 <= row["value"] <= 1]
    panels = []
    if shared:
        words = "; ".join(f"{row['name']} {row['shown']}" for row in shared)
        panels.append(
            Panel(
                title="Metrics, with 95 % intervals",
                spec=draw_intervals(shared, lines=[line], x_title="score", from_zero=True),
                alternative=f"Each metric of the run: {words}.",
            )
        )
    scored = digest.scores.total()
    if scored:
        between = count_text(scored - digest.num_zero - digest.num_full)
        panels.append(
            Panel(
                title=f"Samples by {metrics[0]['name']}",
                spec=draw_histogram(score_rows(digest), x_title=f"{metrics[0]['name']} of a sample", y_title="samples"),
                alternative=f"Of {plural(scored, 'sample')}, {count_text(digest.num_zero)} score 0, "
                f"{count_text(digest.num_full)} score 1 and {between} lie between.",
            )
        )
    columns = (
        Column(title="metric", field="name", words=True),
        Column(title="value", field="value", show=score_text),
        Column(title="± (95 %)", field="ci95", show=score_text),
        Column(title="standard deviation", field="std", show=score_text),
        Column(title="samples", field="count", show=count_text),
    )
    return Section(title="Metrics", panels=tuple(panels), table=Table(caption="Metrics", columns=columns, rows=metrics))


def figure_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Speed, memory and loading, named and written out; what is not known is left out."""
    loader = summary.get("loader")
    loader = loader if isinstance(loader, dict) else {}
    lengths = summary.get("answer_tokens")
    lengths = lengths if isinstance(lengths, dict) else {}
    figures = (
        ("samples", count_text(summary.get("num_samples"))),
        ("throughput", f"{significant(summary.get('samples_per_second'))} samples/s"),
        ("batch size used", count_text(summary.get("batch_size_used"))),
        ("out of memory", _times(summary.get("oom_events"))),
        ("peak allocated", bytes_text(summary.get("peak_allocated_bytes"))),
        ("peak reserved", bytes_text(summary.get("peak_reserved_bytes"))),
        ("padding", fraction_text(summary.get("padding_fraction"))),
        ("waited for data", fraction_text(summary.get("gpu_wait_fraction"))),
        ("loading processes", count_text(loader.get("num_workers"))),
        ("GPU use (mean)", fraction_text(summary.get("gpu_utilisation_mean"))),
        ("answer tokens, median", count_text(lengths.get("p50"))),
        ("answer tokens, P99", count_text(lengths.get("p99"))),
        ("answers cut off", fraction_text(lengths.get("truncated_fraction"))),
        ("ranks", count_text(summary.get("ranks"))),
        ("resumed", f"{count_text(summary.get('num_resumed'))} samples"),
        ("run time", duration_text(summary.get("seconds"))),
    )
    return [{"name": name, "value": value} for name, value in figures if not value.startswith("—")]


def _times(value: object) -> str:
    count = number(value)
    return "—" if count is None else plural(int(count), "time")


def _speed_section(run: Run, digest: SampleDigest) -> Section:
    rows = batch_rows(digest)
    table = Table(caption="Speed, memory and loading", columns=_NAMED, rows=figure_rows(run.summary))
    said = [f"{text(run.plan.get('device'))}: {run.plan['reason']}."] if run.plan.get("reason") else []
    if run.plan.get("unit") == "tokens":
        said.append(f"The plan is a cap of {count_text(run.plan.get('size'))} tokens in a batch, padding included.")
    if len(rows) < 2:  # all batches alike: nothing to draw
        return Section(title="Speed and memory", paragraphs=tuple(said), table=table, table_open=True)
    most = max(rows, key=lambda row: row["count"])
    panel = Panel(
        title="Samples by the size of their batch",
        spec=draw_counts(rows, x_title="batch size", y_title="samples"),
        alternative=f"Most samples ({most['count_shown']}) ran in batches of {most['span']}.",
    )
    return Section(title="Speed and memory", paragraphs=tuple(said), panels=(panel,), table=table, table_open=True)


def _failure_section(digest: SampleDigest) -> Section | None:
    rows = digest.failures
    if not rows:
        return None
    columns = (
        Column(title="sample", field="id", words=True),
        Column(title="reason", field="reason", words=True),
        Column(title="message", field="message", words=True),
    )
    table = Table(
        caption=f"The first {len(rows)} of {plural(digest.num_failed, 'failed sample')}", columns=columns, rows=rows
    )
    return Section(title="Failed samples", table=table, table_open=True)


def _example_section(digest: SampleDigest) -> Section | None:
    rows = [*digest.wrong, *digest.right]
    if not rows:
        return None
    columns = (
        Column(title="sample", field="id", words=True),
        Column(title="score", field="score"),
        Column(title="input", field="input", words=True),
        Column(title="reference", field="reference", words=True),
        Column(title="prediction", field="prediction", words=True),
    )
    table = Table(caption="The first samples below a half, then the first above", columns=columns, rows=rows)
    return Section(title="Examples", table=table)


def _notes(summary: Mapping[str, Any]) -> Section | None:
    notes = summary.get("notes")
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return Section(title="Notes", points=lines) if lines else None
