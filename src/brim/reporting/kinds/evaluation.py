"""Evaluations: metrics, the scores behind them, speed, the machine, failures and examples; of one run or of several.

Several are also held against each other sample by sample: which answers turned right or wrong.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, Samples, mapping, value_at
from brim.errors import plural
from brim.reporting.base import (
    Column,
    Fact,
    Figure,
    Page,
    PageTable,
    RunKind,
    Section,
    facts,
    figure_table,
    note_section,
    present,
    run_columns,
    words,
)
from brim.reporting.charts import Axis, Chart, Row, bar_chart, category_chart, interval_ends
from brim.reporting.kinds.compared import (
    comparison_document,
    difference_section,
    header_of,
    labels_of,
    note_on_data,
)
from brim.reporting.kinds.sample_pairs import RIGHT_FROM, clipped, difference_of, pair_samples
from brim.reporting.machine import machine_section
from brim.reporting.repeat import repeat_sections
from brim.reporting.search import plan_section
from brim.reporting.theme import series_for
from brim.units import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    fraction_text,
    interval_text,
    number,
    ratio_text,
    score_text,
    short_name,
    signed_text,
    significant,
    text,
)

__all__ = ["EVALUATION", "compare_evaluations", "digest_samples", "evaluation_page", "metric_rows"]

BINS = 20
FAILURES, EXAMPLES = 20, 8  # rows of a page
# Figures of a run that a comparison's document has.
_COMPARED = (
    "samples_per_second", "batch_size_used", "peak_allocated_bytes", "peak_reserved_bytes", "oom_events",
    "gpu_utilisation_mean", "num_samples", "num_failed",
)  # fmt: skip


def _rate(value: object) -> str:
    return f"{significant(value)} samples/s"


def _times(value: object) -> str:
    count = number(value)
    return UNKNOWN if count is None else plural(int(count), "time")


FIGURES = (
    Figure("samples", "num_samples", count_text),
    Figure("failed samples", "num_failed", count_text),
    Figure("throughput (samples/s)", "samples_per_second", significant),
    Figure("batch size used", "batch_size_used", count_text),
    Figure("out of memory", "oom_events", _times),
    Figure("peak allocated", "peak_allocated_bytes", bytes_text),
    Figure("peak reserved", "peak_reserved_bytes", bytes_text),
    Figure("padding", "padding_fraction", fraction_text),
    Figure("idle between batches", "gpu_wait_fraction", fraction_text),
    Figure("loading processes", "loader.num_workers", count_text),
    Figure("GPU use (mean)", "gpu_utilisation_mean", fraction_text),
    Figure("answer tokens, median", "answer_tokens.p50", count_text),
    Figure("answer tokens, P99", "answer_tokens.p99", count_text),
    Figure("answers cut off", "answer_tokens.truncated_fraction", fraction_text),
    Figure("ranks", "ranks", count_text),
    Figure("resumed samples", "num_resumed", count_text),
    Figure("run time", "seconds", duration_text),
)
METRIC_COLUMNS = (
    words("metric", "name"),
    Column("value", "value", score_text),
    Column("± (95 %)", "ci95", score_text),
    Column("standard deviation", "std", score_text),
    Column("samples", "count", count_text),
)
EXAMPLE_COLUMNS = (
    words("sample", "id"), Column("score", "score"), words("input"), words("reference"), words("prediction"),
)  # fmt: skip


def metric_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every metric with the ends of its interval; the interval is of the samples' mean, so it goes with that figure."""
    rows = []
    for name, figure in mapping(summary.get("metrics")).items():
        value, mean, half = (number(mapping(figure).get(field)) for field in ("value", "mean", "ci95"))
        if value is None:
            continue
        half = half if mean == value else None  # a figure of the whole corpus is not the mean of its samples
        rows.append(
            {"name": name, "value": value, "std": number(figure.get("std")), "count": number(figure.get("count")),
             "ci95": half, **interval_ends(value, half), "shown": interval_text(value, half)}
        )  # fmt: skip
    return rows


@dataclasses.dataclass(kw_only=True)
class SampleDigest:
    """What a page shows of a run's samples, gathered in one pass over their lines."""

    num_lines: int = 0
    num_failed: int = 0
    scores: Counter[int] = dataclasses.field(default_factory=Counter)  # by bar, of `BINS`
    num_zero: int = 0
    num_full: int = 0
    batch_sizes: Counter[int] = dataclasses.field(default_factory=Counter)  # by power of two
    failures: list[Row] = dataclasses.field(default_factory=list)  # the first of them
    wrong: list[Row] = dataclasses.field(default_factory=list)
    right: list[Row] = dataclasses.field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """One more sample."""
        self.num_lines += 1
        size, score, error = number(line.get("batch_size")), number(line.get("score")), line.get("error")
        if size is not None and size >= 1:
            self.batch_sizes[int(size).bit_length() - 1] += 1
        if score is not None:
            self.scores[min(max(int(score * BINS), 0), BINS - 1)] += 1
            self.num_zero += score <= 0
            self.num_full += score >= 1
        if error is not None:
            self.num_failed += 1
            failure = error if isinstance(error, dict) else {"message": error}
            row = {"id": line.get("id"), "reason": failure.get("reason"), "message": clipped(failure.get("message"))}
            _keep(self.failures, row, FAILURES)
        elif score is not None:
            shown = {field: clipped(line.get(field)) for field in ("input", "reference", "prediction")}
            row = {"id": line.get("id"), **shown, "score": significant(score)}
            _keep(self.right if score >= RIGHT_FROM else self.wrong, row, EXAMPLES)


def _keep(kept: list[Row], row: Row, most: int) -> None:
    if len(kept) < most:
        kept.append(row)


def digest_samples(lines: Iterable[Mapping[str, Any]]) -> SampleDigest:
    """All lines, read once."""
    digest = SampleDigest()
    for line in lines:
        digest.add(line)
    return digest


def evaluation_page(run: Run) -> Page:
    """Headline, metrics, speed, machine, samples, settings."""
    summary, samples = run.summary, run.samples()
    digest = digest_samples(samples)
    metrics = metric_rows(summary)
    main = metrics[0] if metrics else None
    return Page(
        title=f"Evaluation of {short_name(run.request.get('model'))}",
        subtitle=f"on {text(run.request.get('data'))}, task {text(run.request.get('task'))}; "
        f"{count_text(summary.get('num_samples'))} samples in {run.duration}",
        headline=f"{main['name']}: {main['shown']}" if main else "No metric: the data has no references",
        facts=_facts(summary, metrics),
        warnings=_warnings(summary, samples.damaged),
        sections=present(
            Section(
                title="Metrics",
                charts=present(_metric_chart([("run", metrics)]), _score_chart(main["name"], digest)),
                table=PageTable("Metrics", METRIC_COLUMNS, metrics),
            )
            if main
            else None,
            _speed_section(run, digest),
            plan_section(run.plan),
            machine_section([("", run.trace())], limit_bytes=run.limit_bytes),
            _failure_section(digest),
            _example_section(digest),
            note_section(summary.get("notes")),
            *repeat_sections(run),
        ),
    )


def _facts(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    least, most = (value_at(summary, f"batch_sizes.{end}") for end in ("smallest", "largest"))
    spread = f"from {count_text(least)} to {count_text(most)}" if least != most else ""
    return facts(
        *(Fact(row["name"], row["shown"]) for row in metrics[1:4]),
        Fact("throughput", _rate(summary.get("samples_per_second"))),
        Fact("batch size", count_text(summary.get("batch_size_used")), spread),
        Fact("reserved memory", bytes_text(summary.get("peak_reserved_bytes")), "peak"),
        Fact("GPU use", fraction_text(summary.get("gpu_utilisation_mean")), "mean"),
    )


def _warnings(summary: Mapping[str, Any], damaged: int) -> tuple[str, ...]:
    failed, bad = (int(number(summary.get(name)) or 0) for name in ("num_failed", "num_bad_records"))
    return present(
        f"{plural(failed, 'sample')} failed: counted as wrong." if failed else None,
        f"{plural(bad, 'record')} could not be read and were left out." if bad else None,
        f"{plural(damaged, 'line')} of samples.jsonl could not be read." if damaged else None,
    )


def _metric_chart(runs: Sequence[tuple[str, Sequence[Row]]]) -> Chart | None:
    """The metrics of each run; of a single one, those between 0 and 1 on an axis from zero."""
    rows = [{**row, "line": label, "x": row["value"]} for label, metrics in runs for row in metrics]
    if len(runs) == 1:
        rows = [row for row in rows if 0 <= row["x"] <= 1]
    series = series_for([label for label, _ in runs])
    x = Axis("score", "zero" if len(runs) == 1 else "score")
    return category_chart("Metrics, with 95 % intervals", rows, x=x, what="metric", series=series)


def _score_chart(metric: str, digest: SampleDigest) -> Chart | None:
    """How many samples have which score: bars of equal width from 0 to 1."""
    scored = digest.scores.total()
    if not scored:
        return None
    rows = []
    for place in range(BINS):
        low, high, count = place / BINS, (place + 1) / BINS, digest.scores[place]
        label = f"{low:.2f} to {high:.2f}"
        rows.append({"x": low, "low": low, "high": high, "y": count, "line": "", "label": label,
                     "shown": count_text(count)})  # fmt: skip
    caption = (
        f"Of {plural(scored, 'sample')}, {count_text(digest.num_zero)} score 0, {count_text(digest.num_full)} score 1 "
        f"and {count_text(scored - digest.num_zero - digest.num_full)} lie between."
    )
    return bar_chart(f"Samples by {metric}", rows, x=Axis(f"{metric} of a sample"), figure="samples", caption=caption)


def _speed_section(run: Run, digest: SampleDigest) -> Section:
    """How many samples ran in batches of which size, in doublings; and every figure."""
    rows: list[dict[str, Any]] = []
    for power in range(min(digest.batch_sizes, default=0), max(digest.batch_sizes, default=-1) + 1):
        low, high, count = 2**power, 2 ** (power + 1) - 1, digest.batch_sizes[power]
        span = str(low) if low == high else f"{low:,} to {high:,}"
        rows.append({"x": span, "y": count, "line": "", "label": span, "shown": count_text(count)})
    most = max(rows, key=lambda row: row["y"], default=None)
    chart = None
    if most is not None and len(rows) > 1:  # of batches that are all alike there is nothing to draw
        chart = bar_chart(
            "Samples by the size of their batch", rows, x=Axis("batch size"), figure="samples",
            caption=f"Most samples ({most['shown']}) ran in batches of {most['x']}.",
        )  # fmt: skip
    plan = run.plan
    planned = {
        "tokens": f"The plan is a cap of {count_text(plan.get('size'))} tokens in a batch, padding included.",
        "kv_bytes": f"Answers came from a pool with {bytes_text(plan.get('size'))} of keys and values; a sample's "
        "batch size is the number of sequences in it when it was admitted.",
    }
    return Section(
        title="Speed and memory",
        paragraphs=present(
            f"{text(plan.get('device'))}: {plan['reason']}." if plan.get("reason") else None,
            planned.get(str(plan.get("unit"))),
        ),
        charts=present(chart),
        table=figure_table("Speed, memory and loading", FIGURES, [run.summary]),
        open=True,
    )


def _failure_section(digest: SampleDigest) -> Section | None:
    rows = digest.failures
    if not rows:
        return None
    every = plural(digest.num_failed, "failed sample")
    caption = every if len(rows) == digest.num_failed else f"The first {len(rows)} of {every}"
    columns = (words("sample", "id"), words("reason"), words("message"))
    return Section(title="Failed samples", table=PageTable(caption, columns, rows))


def _example_section(digest: SampleDigest) -> Section | None:
    rows = [*digest.wrong, *digest.right]
    table = PageTable("The first samples below a half, then the first above", EXAMPLE_COLUMNS, rows)
    return Section(title="Examples", table=table, open=False) if rows else None


# ------------------------------------------------------------------------------------------- side by side


def compare_evaluations(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """Every run's figures, and every other run paired with the first."""
    labels = labels_of([run.folder for run in runs])
    data = note_on_data(runs, labels)
    samples = [run.samples() for run in runs]
    described = []
    for run, label in zip(runs, labels, strict=True):
        metrics = {row["name"]: {"value": row["value"], "ci95": row["ci95"]} for row in metric_rows(run.summary)}
        figures = {name: number(run.summary.get(name)) for name in _COMPARED}
        described.append({**header_of(run, label), "metrics": metrics, **figures})
    pairs = [_pair(described, samples, second, judged=not data.differs[second]) for second in range(1, len(runs))]
    document = comparison_document(runs, data, runs=described, pairs=pairs, notes=_notes(described, samples, pairs))
    return document, _compared_page(document, runs)


def _pair(
    described: Sequence[Mapping[str, Any]], samples: Sequence[Samples], second: int, *, judged: bool
) -> dict[str, Any]:
    """The second run against the first; of runs on different data only samples that are the same are paired."""
    names = [name for name in described[0]["metrics"] if name in described[second]["metrics"]]
    paired = pair_samples(samples[0], samples[second], names, same_content=not judged)
    return {
        "first": 0, "second": second, "judged": judged, "common_samples": paired.common,
        "only_in_first": paired.only_first, "only_in_second": paired.only_second,
        "metrics": {name: difference_of(paired.changes[name]) for name in names},
        "agreement": paired.agreement(names[0]) if names and paired.common else None,
    }  # fmt: skip


def _notes(
    described: Sequence[Mapping[str, Any]], samples: Sequence[Samples], pairs: Sequence[Mapping[str, Any]]
) -> list[str]:
    notes = []
    for run, kept in zip(described, samples, strict=True):
        if not kept.path.exists():
            notes.append(f"{run['label']} has no samples.jsonl, so its samples cannot be paired")
        if kept.damaged:
            notes.append(f"{run['label']}: {plural(kept.damaged, 'line')} of samples.jsonl could not be read")
    for pair in pairs:
        first, second = described[pair["first"]]["label"], described[pair["second"]]["label"]
        if not pair["common_samples"]:
            notes.append(f"{first} and {second} have no sample in common: only the whole runs are compared")
        elif pair["only_in_first"] or pair["only_in_second"]:
            notes.append(
                f"{plural(pair['only_in_first'], 'sample')} only in {first} and {count_text(pair['only_in_second'])} "
                f"only in {second} are left out of the pairs"
            )
        if not pair["metrics"]:
            notes.append(f"{first} and {second} share no metric")
    return notes


def _compared_page(document: Mapping[str, Any], runs: Sequence[Run]) -> Page:
    """Differences first, then metrics, speed, and the samples that turned."""
    labels = [run["label"] for run in document["runs"]]
    figures = figure_table("Speed and memory of each run", FIGURES, [run.summary for run in runs], labels)
    return Page(
        title=f"{plural(len(runs), 'evaluation')} compared",
        subtitle=" · ".join(labels),
        headline=f"{labels[1]} against {labels[0]}",
        facts=_compared_facts(document),
        warnings=(*document["warnings"], *document["notes"]),
        sections=present(
            _paired_section(document, labels),
            _compared_metrics(runs, labels),
            Section(title="Speed and memory", table=figures),
            *(_turned_section(pair, labels) for pair in document["pairs"]),
            difference_section(document),
        ),
    )


def _compared_facts(document: Mapping[str, Any]) -> tuple[Fact, ...]:
    pair = document["pairs"][0]
    first, second = document["runs"][0], document["runs"][pair["second"]]
    known = [(name, change) for name, change in pair["metrics"].items() if change is not None]
    before, after = first["samples_per_second"], second["samples_per_second"]
    agreement = pair["agreement"]
    return facts(
        *(Fact(name, signed_text(one["difference"], one["ci95"]), _verdict(one, pair)) for name, one in known[:3]),
        Fact("throughput", ratio_text(after / before), _rate(after)) if pair["judged"] and before and after else None,
        Fact(
            "samples that turned",
            f"{count_text(agreement['gained'])} gained, {count_text(agreement['lost'])} lost",
            f"of {count_text(pair['common_samples'])}",
        )
        if agreement
        else None,
    )


def _verdict(change: Mapping[str, Any], pair: Mapping[str, Any]) -> str:
    """Whether the interval leaves zero out; of runs on different data nothing is said."""
    if not pair["judged"]:
        return f"not judged: different data, {plural(change['count'], 'sample')} in common"
    if abs(change["difference"]) <= change["ci95"]:
        return "no difference beyond chance"
    return "higher" if change["difference"] > 0 else "lower"


def _paired_section(document: Mapping[str, Any], labels: Sequence[str]) -> Section | None:
    rows = [
        {
            "name": name, "line": labels[pair["second"]], "x": change["difference"],
            "low": change["difference"] - change["ci95"], "high": change["difference"] + change["ci95"],
            "shown": signed_text(change["difference"], change["ci95"]), "count": change["count"],
            "verdict": _verdict(change, pair),
        }
        for pair in document["pairs"]
        for name, change in pair["metrics"].items()
        if change is not None
    ]  # fmt: skip
    if not rows:
        return None
    chart = category_chart(
        f"Difference from {labels[0]}, with 95 % intervals", rows, x=Axis("difference of the mean score"), rule=0,
        what="metric", series=[dataclasses.replace(one, named=True) for one in series_for(labels)[1:]],
    )  # fmt: skip
    columns = (
        words("metric", "name"), words("run", "line"), Column("difference", "shown"),
        Column("samples", "count", count_text), words("reading", "verdict"),
    )  # fmt: skip
    return Section(
        title="Paired differences",
        paragraphs=("Sample by sample on the samples that both runs have, so what is hard for both does not blur it.",),
        charts=present(chart),
        table=PageTable("Paired differences", columns, rows),
    )


def _compared_metrics(runs: Sequence[Run], labels: Sequence[str]) -> Section | None:
    metrics = [(label, metric_rows(run.summary)) for label, run in zip(labels, runs, strict=True)]
    rows: dict[str, dict[str, Any]] = {}
    for place, (_, own) in enumerate(metrics):
        for row in own:
            rows.setdefault(row["name"], {"name": row["name"]})[str(place)] = row["value"]
    columns = (words("metric", "name"), *run_columns(labels, score_text))
    table = PageTable("Metrics", columns, list(rows.values()))
    return Section(title="Metrics", charts=present(_metric_chart(metrics)), table=table) if rows else None


def _turned_section(pair: Mapping[str, Any], labels: Sequence[str]) -> Section | None:
    agreement = pair["agreement"]
    if agreement is None:
        return None
    first, second = (labels[pair[side]] for side in ("first", "second"))
    counted = {name: count_text(agreement[name]) for name in ("both_right", "both_wrong", "gained", "lost")}
    turned = (
        f"Of {plural(pair['common_samples'], 'common sample')}: {counted['both_right']} right in both, "
        f"{counted['both_wrong']} wrong in both, {counted['gained']} right only in {second}, "
        f"{counted['lost']} right only in {first}. The answer is the same in "
        f"{fraction_text(agreement['same_prediction'] / pair['common_samples'])}."
    )
    said = (f"A sample counts as right from a {agreement['metric']} of {agreement['right_from']:g}.", turned)
    rows = [
        {**one, "turned": kind, "first": one["first"]["prediction"], "second": one["second"]["prediction"]}
        for kind in ("lost", "gained")
        for one in agreement["examples"][kind]
    ]
    columns = (
        words("sample", "id"), words(f"in {second}", "turned"), words("input"), words("reference"),
        words(first, "first"), words(second, "second"),
    )  # fmt: skip
    table = PageTable("The first samples that turned", columns, rows) if rows else None
    return Section(title=f"Samples that turned: {second}", paragraphs=said, table=table, open=False)


EVALUATION = RunKind(name="eval", page=evaluation_page, compare=compare_evaluations)
HARNESS = RunKind(name="lm-eval", page=evaluation_page, compare=compare_evaluations)  # samples are requests
