"""The figures of a training run, from what every rank counted. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.monitor.sampler import MonitorSummary
from brim.records import BatchSizes, Plan
from brim.training.loop import Progress

__all__ = ["RankReport", "loss_curve", "seed_figures", "summarise", "throughput"]

MOST_POINTS = 200  # of the loss curve in run.json; steps.jsonl has all of it
MOST_MARKS = 100  # of `throughput`


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank counted and measured."""

    plan: Plan
    sizes: BatchSizes | None
    oom_events: int
    eval_batch_size: int | None
    eval_oom_events: int
    eval_seconds: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    alloc_retries: int
    loader_wait_seconds: float
    workers: int
    skipped_steps: int
    monitor: MonitorSummary
    checkpoint_seconds: float | None = None  # that checkpoints held the loop up; None: it wrote none by itself
    wait_fractions: Mapping[str, float] | None = None  # of the loop's time, the device's waiting by cause
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, for the way to another rank."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json(), "monitor": self.monitor.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankReport:
        """Read another rank's report."""
        more = {
            "plan": Plan.from_json(data["plan"]),
            "sizes": None if data["sizes"] is None else BatchSizes(**data["sizes"]),
            "monitor": MonitorSummary(
                **{**data["monitor"], "throttle_reasons": tuple(data["monitor"]["throttle_reasons"])}
            ),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **more})


def seed_figures(values: Sequence[float]) -> dict[str, Any]:
    """A figure over seeds: mean, deviation (None for one), and each seed's value."""
    mean = math.fsum(values) / len(values)
    spread = (
        math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else None
    )
    return {"mean": mean, "deviation": spread, "values": list(values)}


def loss_curve(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Loss against samples, in about as many points as a plot shows: means over neighbouring steps."""
    if not steps:
        return []
    width = math.ceil(len(steps) / MOST_POINTS)
    groups = [steps[start : start + width] for start in range(0, len(steps), width)]
    return [
        {
            "samples": group[-1]["samples"],
            "loss": math.fsum(step["loss"] for step in group) / len(group),
            "effective_batch": group[-1]["effective_batch"],
        }
        for group in groups
    ]


def throughput(steps: Sequence[Mapping[str, Any]], *, after_step: int = 0) -> list[list[float]]:
    """Points (seconds of training, samples) of the steps after one, both cumulative; the last point is the end."""
    seconds, samples, points = 0.0, 0, []
    for step in steps:
        if step["step"] > after_step:
            seconds, samples = seconds + step["seconds"], samples + step["effective_batch"]
            points.append([seconds, samples])
    width = max(math.ceil(len(points) / MOST_MARKS), 1)
    return points[::-1][::width][::-1]


def summarise(
    progress: Progress,
    ranks: Sequence[RankReport],
    *,
    steps: Sequence[Mapping[str, Any]],
    effective_batch: int,
    learning_rate: Mapping[str, Any],
    noise: Mapping[str, Any] | None,
    seed: int,
    fast_path: str = "off",
    resumed_after: int = 0,  # the step that this start continued from
) -> dict[str, Any]:
    """The `summary` of run.json."""
    first = ranks[0]
    rows = progress.rows
    best = rows[progress.best_epoch] if progress.best_epoch is not None and rows else (rows[-1] if rows else {})
    sizes = _all_sizes(ranks)
    micro = sizes.median if sizes else first.plan.size
    share = math.ceil(effective_batch / len(ranks))
    return {
        "metrics": {name: seed_figures([value]) for name, value in _figures(best).items()},
        "last_metrics": _figures(rows[-1]) if rows else {},
        "seeds": [seed],
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "steps": progress.step,
        "samples": progress.samples,
        "skipped_steps": first.skipped_steps,
        "stopped_early": progress.stopped_early,
        "samples_per_second": progress.samples / progress.train_seconds if progress.train_seconds else None,
        "micro_batch_size": micro,
        "effective_batch_size": effective_batch,
        "accumulation_steps": math.ceil(share / micro) if micro else None,
        "eval_batch_size": first.eval_batch_size,
        "batch_size_used": micro,
        "batch_sizes": None if sizes is None else dataclasses.asdict(sizes),
        "batch_size_max": first.plan.batch_size_max,
        "effective_batches": progress.batches,
        "learning_rate": dict(learning_rate),
        "noise_scale": None if noise is None else dict(noise),
        "oom_events": sum(rank.oom_events + rank.eval_oom_events for rank in ranks),
        "alloc_retries": sum(rank.alloc_retries for rank in ranks),
        "peak_allocated_bytes": _largest([rank.peak_allocated_bytes for rank in ranks]),
        "peak_reserved_bytes": _largest([rank.peak_reserved_bytes for rank in ranks]),
        "gpu_utilisation_mean": _mean([rank.monitor.gpu_utilisation_mean for rank in ranks]),
        **_waiting([rank.wait_fractions for rank in ranks if rank.wait_fractions is not None]),
        "fast_path": fast_path,
        "seconds": progress.train_seconds,
        "eval_seconds": max(rank.eval_seconds for rank in ranks),
        "loader": {"num_workers": first.workers, "wait_seconds": max(rank.loader_wait_seconds for rank in ranks)},
        "checkpoint_seconds": max(
            (one for rank in ranks if (one := rank.checkpoint_seconds) is not None), default=None
        ),
        "throughput": throughput(steps, after_step=resumed_after),
        "loss_curve": loss_curve(steps),
        "monitor": first.monitor.to_json(),
        "ranks": len(ranks),
    }


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Losses and figures of an epoch, as people name them: top1, val_loss, train_loss."""
    found = {}
    for name, value in row.items():
        if value is not None and (name == "train_loss" or name.startswith("val_")):
            found[name if name in ("train_loss", "val_loss") else name.removeprefix("val_")] = float(value)
    return found


def _waiting(ranks: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The mean over ranks of their device's waiting, and of each cause of it."""
    causes = {name: math.fsum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]} if ranks else None
    return {"gpu_wait_fraction": None if causes is None else math.fsum(causes.values()), "gpu_wait_causes": causes}


def _all_sizes(ranks: Sequence[RankReport]) -> BatchSizes | None:
    known = [rank.sizes for rank in ranks if rank.sizes is not None]
    if not known:
        return None
    per_rank = tuple(rank.sizes.median if rank.sizes else 0 for rank in ranks) if len(ranks) > 1 else None
    return BatchSizes(
        smallest=min(one.smallest for one in known),
        median=known[0].median,
        largest=max(one.largest for one in known),
        per_rank=per_rank,
    )


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
