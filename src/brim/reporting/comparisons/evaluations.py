"""Evaluations side by side: metrics and speeds, and sample by sample which answers turned right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Fact, Page, Panel, Section, Table
from brim.reporting.charts.intervals import draw_intervals
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
from brim.reporting.read import Run, Samples
from brim.reporting.rows.evaluation import metric_rows
from brim.reporting.rows.pairs import difference_of, pair_samples
from brim.reporting.units import (
    bytes_text,
    count_text,
    fraction_text,
    number,
    ratio_text,
    score_text,
    signed_text,
    significant,
    text,
)

__all__ = ["compare_evaluations", "evaluations_page"]

_FIGURES: dict[str, tuple[str, Callable[[object], str]]] = {
    "samples_per_second": ("throughput (samples/s)", significant),
    "batch_size_used": ("batch size used", count_text),
    "peak_allocated_bytes": ("peak allocated", bytes_text),
    "peak_reserved_bytes": ("peak reserved", bytes_text),
    "oom_events": ("OOM events", count_text),
    "gpu_utilisation_mean": ("GPU use (mean)", fraction_text),
    "num_samples": ("samples", count_text),
    "num_failed": ("failed samples", count_text),
}


def compare_evaluations(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison as a document: every run's figures, and every other run paired with the first."""
    labels = labels_of([run.folder for run in runs])
    data = note_on_data(runs, labels)
    samples = [run.samples() for run in runs]
    described = []
    for run, label in zip(runs, labels, strict=True):
        metrics = {row["name"]: {"value": row["value"], "ci95": row["ci95"]} for row in metric_rows(run.summary)}
        figures = {name: number(run.summary.get(name)) for name in _FIGURES}
        described.append({**header_of(run, label), "metrics": metrics, **figures})
    pairs = [_pair(described, samples, second, judged=not data.differs[second]) for second in range(1, len(runs))]
    return {
        "schema": COMPARISON_SCHEMA,
        "kind": "eval",
        **data.to_json(),
        "runs": described,
        "pairs": pairs,
        "settings_that_differ": differing_rows(runs),
        "notes": _notes(described, samples, pairs),
    }


def _pair(
    described: Sequence[Mapping[str, Any]], samples: Sequence[Samples], second: int, *, judged: bool
) -> dict[str, Any]:
    """The second run against the first; of runs on different data only samples that are the same are paired."""
    names = [name for name in described[0]["metrics"] if name in described[second]["metrics"]]
    paired = pair_samples(samples[0], samples[second], names, same_content=not judged)
    return {
        "first": 0,
        "second": second,
        "judged": judged,
        "common_samples": paired.common,
        "only_in_first": paired.only_first,
        "only_in_second": paired.only_second,
        "metrics": {name: difference_of(paired.changes[name]) for name in names},
        "agreement": paired.agreement(names[0]) if names and paired.common else None,
    }


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


def evaluations_page(document: Mapping[str, Any]) -> Page:
    """Differences first, then metrics, speed, and the samples that turned."""
    runs = document["runs"]
    sections = [
        _difference_section(document),
        _metric_section(document),
        _figure_section(document),
        *(_turned_section(document, pair) for pair in document["pairs"]),
        settings_section(document),
    ]
    pair = document["pairs"][0]
    headline, facts = _headline(document, pair)
    return Page(
        title=f"{plural(len(runs), 'evaluation')} compared",
        subtitle=" · ".join(run["label"] for run in runs),
        headline=headline,
        facts=facts,
        warnings=(*document["warnings"], *document["notes"]),
        sections=tuple(section for section in sections if section is not None),
    )


def _headline(document: Mapping[str, Any], pair: Mapping[str, Any]) -> tuple[str, tuple[Fact, ...]]:
    first, second = document["runs"][0], document["runs"][pair["second"]]
    known = [(name, change) for name, change in pair["metrics"].items() if change is not None]
    headline = f"{second['label']} against {first['label']}"
    facts = [
        Fact(name=name, value=signed_text(change["difference"], change["ci95"]), note=_verdict(change, pair))
        for name, change in known[:3]
    ]
    if pair["judged"] and first["samples_per_second"] and second["samples_per_second"]:
        faster = ratio_text(second["samples_per_second"] / first["samples_per_second"])
        facts.append(
            Fact(name="throughput", value=faster, note=f"{significant(second['samples_per_second'])} samples/s")
        )
    agreement = pair["agreement"]
    if agreement:
        turned = f"{count_text(agreement['gained'])} gained, {count_text(agreement['lost'])} lost"
        facts.append(Fact(name="samples that turned", value=turned, note=f"of {count_text(pair['common_samples'])}"))
    return headline, tuple(facts)


def _verdict(change: Mapping[str, Any], pair: Mapping[str, Any]) -> str:
    """Whether the interval leaves zero out; of runs on different data nothing is said."""
    if not pair["judged"]:
        return f"not judged: different data, {plural(change['count'], 'sample')} in common"
    if abs(change["difference"]) <= change["ci95"]:
        return "no difference beyond chance"
    return "higher" if change["difference"] > 0 else "lower"


def _difference_section(document: Mapping[str, Any]) -> Section | None:
    first = document["runs"][0]["label"]
    rows = [
        {
            "name": name,
            "line": document["runs"][pair["second"]]["label"],
            "x": change["difference"],
            "low": change["difference"] - change["ci95"],
            "high": change["difference"] + change["ci95"],
            "shown": signed_text(change["difference"], change["ci95"]),
            "count": change["count"],
            "verdict": _verdict(change, pair),
        }
        for pair in document["pairs"]
        for name, change in pair["metrics"].items()
        if change is not None
    ]
    if not rows:
        return None
    lines = lines_of(document)[1:]
    words = "; ".join(f"{row['line']} {row['name']} {row['shown']} ({row['verdict']})" for row in rows)
    panel = Panel(
        title=f"Difference from {first}, with 95 % intervals",
        spec=draw_intervals(rows, lines=lines, x_title="difference of the mean score", zero_line=True),
        alternative=f"Paired differences from {first}: {words}.",
        keys=tuple(line.key() for line in lines),
    )
    columns = (
        Column(title="metric", field="name", words=True),
        Column(title="run", field="line", words=True),
        Column(title="difference", field="shown"),
        Column(title="samples", field="count", show=count_text),
        Column(title="reading", field="verdict", words=True),
    )
    return Section(
        title="Paired differences",
        paragraphs=("Sample by sample on the samples that both runs have, so what is hard for both does not blur it.",),
        panels=(panel,),
        table=Table(caption="Paired differences", columns=columns, rows=rows),
    )


def _metric_section(document: Mapping[str, Any]) -> Section | None:
    runs, lines = document["runs"], lines_of(document)
    rows = [
        {
            "name": name,
            "line": run["label"],
            "x": figure["value"],
            "low": None if figure["ci95"] is None else figure["value"] - figure["ci95"],
            "high": None if figure["ci95"] is None else figure["value"] + figure["ci95"],
            "shown": score_text(figure["value"]),
        }
        for run in runs
        for name, figure in run["metrics"].items()
    ]
    if not rows:
        return None
    names = list(dict.fromkeys(row["name"] for row in rows))
    words = "; ".join(f"{row['name']} {row['shown']} in {row['line']}" for row in rows)
    panel = Panel(
        title="Metrics, with 95 % intervals",
        spec=draw_intervals(rows, lines=lines, x_title="score"),
        alternative=f"Every metric of every run: {words}.",
        keys=tuple(line.key() for line in lines),
    )
    columns = (Column(title="metric", field="name", words=True), *run_columns(document, score_text))
    table = [
        {"name": name, **{str(place): run["metrics"].get(name, {}).get("value") for place, run in enumerate(runs)}}
        for name in names
    ]
    return Section(title="Metrics", panels=(panel,), table=Table(caption="Metrics", columns=columns, rows=table))


def _figure_section(document: Mapping[str, Any]) -> Section:
    rows = []
    for name, (title, show) in _FIGURES.items():
        values = [run[name] for run in document["runs"]]
        if any(value is not None for value in values):
            rows.append({"name": title, **{str(place): show(value) for place, value in enumerate(values)}})
    columns = (Column(title="figure", field="name", words=True), *run_columns(document, text))
    table = Table(caption="Speed and memory of each run", columns=columns, rows=rows)
    return Section(title="Speed and memory", table=table, table_open=True)


def _turned_section(document: Mapping[str, Any], pair: Mapping[str, Any]) -> Section | None:
    agreement = pair["agreement"]
    if agreement is None:
        return None
    first, second = (document["runs"][pair[side]]["label"] for side in ("first", "second"))
    same = agreement["same_prediction"] / pair["common_samples"]
    counted = {name: count_text(agreement[name]) for name in ("both_right", "both_wrong", "gained", "lost")}
    turned = (
        f"Of {plural(pair['common_samples'], 'common sample')}: {counted['both_right']} right in both, "
        f"{counted['both_wrong']} wrong in both, {counted['gained']} right only in {second}, "
        f"{counted['lost']} right only in {first}. The answer is the same in {fraction_text(same)}."
    )
    said = (f"A sample counts as right from a {agreement['metric']} of {agreement['right_from']:g}.", turned)
    rows = [
        {
            "id": one["id"], "turned": kind, "input": one["input"],
            "reference": one["reference"], "first": one["first"]["prediction"], "second": one["second"]["prediction"],
        }
        for kind in ("lost", "gained")
        for one in agreement["examples"][kind]
    ]  # fmt: skip
    if not rows:
        return Section(title=f"Samples that turned: {second}", paragraphs=said)
    columns = (
        Column(title="sample", field="id", words=True),
        Column(title=f"in {second}", field="turned", words=True),
        Column(title="input", field="input", words=True),
        Column(title="reference", field="reference", words=True),
        Column(title=first, field="first", words=True),
        Column(title=second, field="second", words=True),
    )
    table = Table(caption="The first samples that turned", columns=columns, rows=rows)
    return Section(title=f"Samples that turned: {second}", paragraphs=said, table=table)
