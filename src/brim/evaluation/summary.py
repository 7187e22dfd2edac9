"""The figures of a run, from its lines and from what every rank counted. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.evaluation.scoring import Scorer, answer_lengths
from brim.monitor.sampler import MonitorSummary
from brim.records import BatchSizes, Plan
from brim.running.figures import ExecutionFigures

__all__ = ["RankFigures", "merge_plans", "plans_to_keep", "summarise"]


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
        "answer_tokens": answer_lengths(entries),
        "monitor": ranks[0].monitor.to_json(),
        "seconds": seconds,
        "ranks": len(ranks),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
