"""From answers to the lines of samples.jsonl, and from those to the metrics of the run.

A line holds all that a metric needs, so the metrics of a resumed or merged run come from the lines alone, in the
data's order: they equal those of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.errors import BrimError, RequestError
from brim.metrics.base import Metric
from brim.running.executor import Finished
from brim.tasks.base import Answer, Task

__all__ = ["Scorer", "answer_lengths"]


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
        """Which sample a line is of; None for a stranger."""
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
        """Every metric over all lines; predictions are scored anew, since the metrics asked for may have changed."""
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
        "max": lengths[-1],
        "truncated_fraction": truncated / len(lengths),
    }


def _percentile(ordered: Sequence[int], fraction: float) -> int:
    """The smallest length that at least this fraction of the answers do not exceed."""
    place = max(-(-len(ordered) * round(fraction * 100) // 100), 1) - 1
    return ordered[place]
