"""From answers to the lines of samples.jsonl, and from those to the metrics of the run.

A line holds all that a metric needs, so the metrics of a resumed or merged run come from the lines alone, in the
data's order: they equal those of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.errors import BrimError, RequestError
from brim.metrics.base import Metric
from brim.monitor.sampler import MonitorSummary
from brim.records import BatchSizes, Plan
from brim.running.executor import Finished
from brim.running.results import ExecutionFigures, merge_curves
from brim.tasks.base import Answer, Task

__all__ = ["RankFigures", "RunningMean", "Scorer", "answer_lengths", "merge_plans", "plans_to_keep", "summarise"]


class Scorer:
    """Scores the samples of one task by some metrics; the first is the one that `score` stands for."""

    def __init__(self, task: Task, metrics: Sequence[Metric]) -> None:
        self.task = task
        self.metrics = tuple(metric for metric in metrics if self._has_references())
        self._place = {sample.id: item for item, sample in enumerate(task.samples)}

    def _has_references(self) -> bool:
        return any(sample.references for sample in self.task.samples)

    def entry(self, done: Finished) -> dict[str, Any]:
        """A finished sample as a line of samples.jsonl."""
        item = done.item
        answer: Answer = done.result if done.result is not None else Answer(prediction=None)
        scores = self.scores(item, answer.prediction)
        references = list(self.task.references(item))
        line: dict[str, Any] = {
            "id": self.task.samples[item].id,
            "input": self.task.shown_input(item),
            "reference": references[0] if len(references) == 1 else references,
            "prediction": answer.prediction,
            "score": next(iter(scores.values()), None),
            "scores": scores,
            "batch_size": done.batch_size,
            "error": None if done.failure is None else done.failure.to_json(),
        }
        if answer.tokens is not None:
            line |= {"tokens": answer.tokens, "truncated": answer.truncated}
        return line | dict(answer.details)

    def scores(self, item: int, prediction: Any) -> dict[str, float]:
        """The sample's score by each metric; one without an answer scores 0 and stays in the mean."""
        references = self.task.references(item)
        if not references:
            return {}
        facts = self.task.metric_facts(item)
        return {metric.name: _score(metric, prediction, references, facts) for metric in self.metrics}

    def item_of(self, entry: Mapping[str, Any]) -> int | None:
        """Which sample a line is of; None if it is of no sample of this data."""
        return self._place.get(str(entry.get("id")))

    def ordered(self, entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Lines in the data's order, one per sample, all scored by the metrics asked for now."""
        by_item = {item: entry for entry in entries if (item := self.item_of(entry)) is not None}
        return [self._scored_anew(item, by_item[item]) for item in sorted(by_item)]

    def _scored_anew(self, item: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        if list(entry["scores"]) == [metric.name for metric in self.metrics]:
            return dict(entry)
        scores = self.scores(item, entry["prediction"])
        return {**entry, "score": next(iter(scores.values()), None), "scores": scores}

    def aggregate(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Every metric over all lines; predictions are scored again, since the metrics asked for may have changed."""
        items = [(item, entry) for entry in entries if (item := self.item_of(entry)) is not None]
        scored = [(item, entry) for item, entry in items if self.task.references(item)]
        if not scored:
            return {}
        predictions = [entry["prediction"] for _, entry in scored]
        references = [self.task.references(item) for item, _ in scored]
        rows = [self.scores(item, entry["prediction"]) for item, entry in scored]
        return {
            metric.name: metric.aggregate([row[metric.name] for row in rows], predictions, references)
            for metric in self.metrics
        }


def _score(metric: Metric, prediction: Any, references: Sequence[Any], facts: Mapping[str, Any]) -> float:
    try:
        return metric.score(prediction, references, facts)
    except BrimError:
        raise
    except Exception as error:  # a metric of the user's own
        raise RequestError(
            f"metric {metric.name}: sample {facts.get('id')} raised {type(error).__name__}: {error}"
        ) from error


class RunningMean:
    """The mean of the first metric over the lines so far; None before the first that has a score."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self._count, self._sum = 0, 0.0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """These samples are done."""
        scores = [line["score"] for line in lines if line.get("score") is not None]
        self._count += len(scores)
        self._sum += sum(scores)

    @property
    def value(self) -> float | None:
        """The mean."""
        return self._sum / self._count if self._count else None


def answer_lengths(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How long the answers were, in tokens, and how many were cut off; None for tasks that write nothing."""
    lengths = sorted(entry["tokens"] for entry in entries if entry.get("tokens") is not None)
    if not lengths:
        return None
    truncated = sum(bool(entry.get("truncated")) for entry in entries)
    return {
        "p50": _percentile(lengths, 0.50),
        "p95": _percentile(lengths, 0.95),
        "p99": _percentile(lengths, 0.99),
        "p999": _percentile(lengths, 0.999),
        "max": lengths[-1],
        "truncated_fraction": truncated / len(lengths),
    }


def _percentile(ordered: Sequence[int], fraction: float) -> int:
    """The smallest length that at least this fraction of the answers do not exceed."""
    place = max(-(-len(ordered) * round(fraction * 1000) // 1000), 1) - 1
    return ordered[place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank, or one worker of a cluster, counted and measured."""

    figures: ExecutionFigures
    seconds: float
    plan: Plan | None = None  # None: lost before it had one
    wait_fraction: float | None = None
    loader_wait_seconds: float = 0.0
    workers: int = 0
    monitor: MonitorSummary = dataclasses.field(default_factory=MonitorSummary)
    measured: bool = False
    throughput: tuple[tuple[float, int], ...] = ()  # seconds and samples done by then
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, for the way to another rank."""
        plan = None if self.plan is None else self.plan.to_json()
        return {**dataclasses.asdict(self), "plan": plan, "monitor": self.monitor.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFigures:
        """Read another rank's figures."""
        monitor = {**data["monitor"], "throttle_reasons": tuple(data["monitor"]["throttle_reasons"])}
        more = {
            "figures": ExecutionFigures(**data["figures"]),
            "plan": None if data["plan"] is None else Plan.from_json(data["plan"]),
            "monitor": MonitorSummary(**monitor),
            "throughput": tuple((seconds, done) for seconds, done in data["throughput"]),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **more})


def merge_plans(ranks: Sequence[RankFigures]) -> Plan | None:
    """The plan of the first rank that has one; with several, every rank's size beside it."""
    plans = [rank.plan for rank in ranks]
    first = next((plan for plan in plans if plan is not None), None)
    if first is None or len(ranks) == 1:
        return first
    return dataclasses.replace(first, batch_sizes_per_rank=tuple(plan.size if plan else 0 for plan in plans))


def plans_to_keep(ranks: Sequence[RankFigures]) -> list[int]:
    """The ranks that file their plan: for each kind of card the first that made several batches, and no other."""
    kept: dict[str | None, int] = {}
    for rank, outcome in enumerate(ranks):
        if outcome.plan is not None and outcome.figures.batches > 1:
            kept.setdefault(outcome.plan.fingerprint, rank)
    return list(kept.values())


def summarise(
    entries: Sequence[Mapping[str, Any]], scorer: Scorer, ranks: Sequence[RankFigures], *, bad: int = 0
) -> dict[str, Any]:
    """The `summary` of run.json."""
    figures = [rank.figures for rank in ranks]
    counts = [count for one in figures for count in one.batch_counts]
    sizes = BatchSizes.of(counts)
    if sizes is not None and len(ranks) > 1:
        medians = [BatchSizes.of(one.batch_counts) for one in figures]
        sizes = dataclasses.replace(sizes, per_rank=tuple(one.median if one else 0 for one in medians))
    if sizes is None:  # nothing was left to do: the lines remember
        sizes = BatchSizes.of([int(entry["batch_size"]) for entry in entries])
    done_now = sum(one.items for one in figures)
    seconds = max((rank.seconds for rank in ranks), default=0.0)
    cost, padded = sum(one.cost for one in figures), sum(one.padded_cost for one in figures)
    measured = any(rank.measured for rank in ranks)
    return {
        "num_samples": len(entries),
        "num_failed": sum(entry["error"] is not None for entry in entries),
        "num_bad_records": bad,
        "num_resumed": len(entries) - done_now,
        "metrics": scorer.aggregate(entries),
        "samples_per_second": done_now / seconds if seconds > 0 and done_now else None,
        "batch_size_used": None if sizes is None else sizes.median,
        "batch_sizes": None if sizes is None else dataclasses.asdict(sizes),
        "oom_events": sum(one.oom_events for one in figures),
        "plan_seconds": max((one.planning_seconds for one in figures), default=0.0),
        "padding_fraction": 1 - cost / padded if padded else 0.0,
        "gpu_wait_fraction": _mean([rank.wait_fraction for rank in ranks]),
        "loader": {"num_workers": ranks[0].workers, "wait_seconds": max(rank.loader_wait_seconds for rank in ranks)},
        "gpu_utilisation_mean": _mean([rank.monitor.gpu_utilisation_mean for rank in ranks]),
        "peak_allocated_bytes": max(one.peak_allocated_bytes for one in figures) if measured else None,
        "peak_reserved_bytes": max(one.peak_reserved_bytes for one in figures) if measured else None,
        "alloc_retries": _total([one.alloc_retries for one in figures]),
        "throughput": merge_curves(rank.throughput for rank in ranks),
        "batch_times": {
            "padded_cost": padded,
            "busy_seconds": sum(one.busy_seconds for one in figures),
            "batches": [list(row) for one in figures for row in one.batch_times],
        },
        "answer_tokens": answer_lengths(entries),
        "monitor": ranks[0].monitor.to_json(),
        "seconds": seconds,
        "ranks": len(ranks),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _total(counts: Sequence[int | None]) -> int | None:
    """None if any of them was not counted: the rest is not the whole."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
