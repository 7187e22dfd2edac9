"""What is drawn and tabled of an evaluation: metrics with intervals, scores, batch sizes, failures, examples. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from brim.reporting.units import count_text, interval_text, number, significant

__all__ = ["RIGHT_FROM", "SampleDigest", "batch_rows", "clipped", "digest_samples", "metric_rows", "score_rows"]

RIGHT_FROM = 0.5  # a sample with this score or more counts as right
BINS = 20
FAILURES, EXAMPLES = 20, 8  # rows of a page
LONGEST = 300  # characters of an input or an answer

Line = Mapping[str, Any]  # of samples.jsonl


def metric_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every metric with the ends of its interval; the interval is of the samples' mean, so it goes with that figure."""
    metrics = summary.get("metrics")
    rows = []
    for name, figure in (metrics if isinstance(metrics, dict) else {}).items():
        if not isinstance(figure, dict) or number(figure.get("value")) is None:
            continue
        value, mean, half = (number(figure.get(field)) for field in ("value", "mean", "ci95"))
        assert value is not None
        own = half is not None and mean == value  # a figure of the whole corpus is not the mean of its samples
        rows.append(
            {
                "name": name, "value": value, "std": number(figure.get("std")), "count": number(figure.get("count")),
                "ci95": half if own else None, "low": value - half if own and half is not None else None,
                "high": value + half if own and half is not None else None,
                "shown": interval_text(value, half if own else None),
            }
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
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the first of them
    wrong: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    right: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, line: Line) -> None:
        """One more sample."""
        self.num_lines += 1
        size = number(line.get("batch_size"))
        if size is not None and size >= 1:
            self.batch_sizes[int(size).bit_length() - 1] += 1
        score = number(line.get("score"))
        if score is not None:
            self.scores[min(max(int(score * BINS), 0), BINS - 1)] += 1
            self.num_zero += score <= 0
            self.num_full += score >= 1
        error = line.get("error")
        if error is not None:
            self.num_failed += 1
            _keep(self.failures, _failure(line, error), FAILURES)
        elif score is not None:
            _keep(self.right if score >= RIGHT_FROM else self.wrong, _example(line, score), EXAMPLES)


def digest_samples(lines: Iterable[Line]) -> SampleDigest:
    """All lines, looked at once."""
    digest = SampleDigest()
    for line in lines:
        digest.add(line)
    return digest


def score_rows(digest: SampleDigest) -> list[dict[str, Any]]:
    """How many samples have which score: bars of equal width from 0 to 1."""
    return [
        {
            "low": place / BINS,
            "high": (place + 1) / BINS,
            "count": digest.scores[place],
            "span": f"{place / BINS:.2f} to {(place + 1) / BINS:.2f}",
            "count_shown": count_text(digest.scores[place]),
        }
        for place in range(BINS)
    ]


def batch_rows(digest: SampleDigest) -> list[dict[str, Any]]:
    """How many samples ran in batches of which size, in doublings."""
    rows = []
    for power in range(min(digest.batch_sizes, default=0), max(digest.batch_sizes, default=-1) + 1):
        low, high, count = 2**power, 2 ** (power + 1) - 1, digest.batch_sizes[power]
        span = str(low) if low == high else f"{low:,} to {high:,}"
        rows.append({"span": span, "count": count, "count_shown": count_text(count)})
    return rows


def _keep(kept: list[dict[str, Any]], row: dict[str, Any], most: int) -> None:
    if len(kept) < most:
        kept.append(row)


def _failure(line: Line, error: object) -> dict[str, Any]:
    told = error if isinstance(error, dict) else {"message": error}
    return {"id": line.get("id"), "reason": told.get("reason"), "message": clipped(told.get("message"))}


def _example(line: Line, score: float) -> dict[str, Any]:
    shown = {field: clipped(line.get(field)) for field in ("input", "reference", "prediction")}
    return {"id": line.get("id"), **shown, "score": significant(score)}


def clipped(value: object) -> str | None:
    """Text of anything, cut where it would fill the page."""
    if value is None:
        return None
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return written if len(written) <= LONGEST else written[:LONGEST] + " …"
