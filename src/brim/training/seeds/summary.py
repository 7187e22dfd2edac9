"""The figures of several runs as one training: means, deviations, each run's value, and curves of their means. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from brim.training.seeds.seed_folder import RunRecord
from brim.training.summary import loss_curve, seed_figures

__all__ = ["best_rate", "mean_epochs", "mean_steps", "run_rows", "summarise_runs"]


def summarise_runs(
    records: Sequence[RunRecord],
    *,
    monitor: str,
    steps: Sequence[Mapping[str, Any]],
    choice: Mapping[str, Any],
    machine: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The `summary` of run.json; of several learning rates the metrics are those of the best one.

    Steps, samples and seconds are of all runs together; `steps` are the means that the loss curve is made of.
    `machine` is what was sampled over all of them, where that was.
    """
    done = [record for record in records if record.error is None]
    rate = best_rate(done, monitor)
    best = [record for record in done if record.variant.learning_rate == rate]
    first: Mapping[str, Any] = best[0].summary if best else {}
    seconds = _sum(done, "seconds")
    several = len({record.variant.learning_rate for record in records}) > 1
    return {
        "metrics": _metrics(best),
        "last_metrics": {name: figure["mean"] for name, figure in _metrics(best, "last_metrics").items()},
        "seeds": [record.variant.seed for record in best],
        "learning_rates": _by_rate(done) if several else [],
        "runs": run_rows(records),
        "num_runs": len(records),
        "num_failed": len(records) - len(done),
        "errors": {record.variant.name: record.error for record in records if record.error is not None},
        "best_epoch": None,
        "epochs": max((record.summary["epochs"] for record in done), default=0),
        "steps": _sum(done, "steps"),
        "samples": _sum(done, "samples"),
        "skipped_steps": _sum(done, "skipped_steps"),
        "stopped_early": bool(done) and all(record.summary["stopped_early"] for record in done),
        "num_stopped_early": sum(bool(record.summary["stopped_early"]) for record in done),
        "samples_per_second": _sum(done, "samples") / seconds if seconds else None,
        **{
            name: first.get(name)
            for name in ("micro_batch_size", "effective_batch_size", "accumulation_steps", "batch_size_used",
                         "batch_sizes", "batch_size_max", "loader")
        },
        "eval_batch_size": _largest(done, "eval_batch_size"),
        "effective_batches": [],
        "learning_rate": first.get("learning_rate"),
        "noise_scale": None,
        "oom_events": _sum(done, "oom_events"),
        "alloc_retries": _sum(done, "alloc_retries"),
        "peak_allocated_bytes": _largest(done, "peak_allocated_bytes"),
        "peak_reserved_bytes": _largest(done, "peak_reserved_bytes"),
        "gpu_utilisation_mean": machine["gpu_utilisation_mean"] if machine else _mean(done, "gpu_utilisation_mean"),
        "gpu_wait_fraction": _mean(done, "gpu_wait_fraction"),
        "gpu_wait_causes": _mean_causes(done),
        "fast_path": choice["path"],
        "fast_path_choice": dict(choice),
        "seconds": seconds,
        "eval_seconds": _sum(done, "eval_seconds"),
        "loss_curve": loss_curve(steps),
        "monitor": machine or first.get("monitor"),
        "ranks": 1,
    }  # fmt: skip


def _mean_causes(records: Sequence[RunRecord]) -> dict[str, float] | None:
    known = [causes for record in records if (causes := record.summary.get("gpu_wait_causes"))]
    return {name: statistics.fmean(causes[name] for causes in known) for name in known[0]} if known else None


def best_rate(records: Sequence[RunRecord], monitor: str) -> float | None:
    """The learning rate with the best mean of the monitored figure; the first of equals."""
    found: dict[float, list[float]] = {}
    for record in records:
        figures = record.summary["metrics"]
        asked = monitor.removeprefix("val_")
        wanted = {"loss": ("val_loss",), "auto": ("top1", "mean_iou")}.get(asked, (asked,))
        name = next((known for known in (*wanted, "val_loss", "train_loss") if known in figures), None)
        if name is not None:
            sign = 1 if name in ("top1", "top5", "mean_iou") else -1
            found.setdefault(record.variant.learning_rate, []).append(sign * figures[name]["mean"])
    return max(found, key=lambda rate: statistics.fmean(found[rate]), default=None)


def run_rows(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A row for every run: its figures at its best epoch, or its error."""
    return [
        {
            "name": record.variant.name,
            "seed": record.variant.seed,
            "learning_rate": record.variant.learning_rate,
            "folder": record.folder.name,
            **{name: figure["mean"] for name, figure in record.summary.get("metrics", {}).items()},
            "best_epoch": record.summary.get("best_epoch"),
            "epochs": record.summary.get("epochs", len(record.rows)),
            "stopped_early": record.summary.get("stopped_early"),
            "fast_path": record.summary.get("fast_path"),
            "error": record.error,
        }
        for record in records
    ]


def mean_epochs(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Epoch by epoch the means over the runs that had it, and how many those were."""
    longest = max((len(record.rows) for record in records), default=0)
    rows = []
    for epoch in range(longest):
        had = [record.rows[epoch] for record in records if len(record.rows) > epoch]
        row: dict[str, Any] = {"epoch": epoch, "runs": len(had)}
        for name in had[0]:
            if name != "epoch":
                known = [other[name] for other in had if other.get(name) is not None]
                row[name] = statistics.fmean(known) if known else None
        row |= {name: round(row[name]) for name in ("step", "samples") if row.get(name) is not None}
        rows.append(row)
    return rows


def mean_steps(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Step by step the mean of the loss over the runs that made it; the rest is that of the first such run."""
    lines = []
    for step in itertools.zip_longest(*(record.steps() for record in records)):
        made = [line for line in step if line is not None]
        lines.append({**made[0], "loss": statistics.fmean(line["loss"] for line in made)})
    return lines


def _by_rate(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    rates = dict.fromkeys(record.variant.learning_rate for record in records)
    grouped = {rate: [record for record in records if record.variant.learning_rate == rate] for rate in rates}
    return [
        {
            "learning_rate": rate,
            "seeds": [record.variant.seed for record in group],
            "metrics": _metrics(group),
        }
        for rate, group in grouped.items()
    ]


def _metrics(records: Sequence[RunRecord], field: str = "metrics") -> dict[str, Any]:
    """Every figure that all runs have."""
    every = [record.summary[field] for record in records]
    names = [name for name in (every[0] if every else ()) if all(name in one for one in every)]
    return {name: seed_figures([_value(one[name]) for one in every]) for name in names}


def _value(figure: Any) -> float:
    return float(figure["mean"] if isinstance(figure, Mapping) else figure)


def _known(records: Sequence[RunRecord], name: str) -> list[Any]:
    return [record.summary[name] for record in records if record.summary.get(name) is not None]


def _sum(records: Sequence[RunRecord], name: str) -> Any:
    values = _known(records, name)
    return math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)


def _largest(records: Sequence[RunRecord], name: str) -> Any:
    return max(_known(records, name), default=None)


def _mean(records: Sequence[RunRecord], name: str) -> float | None:
    values = _known(records, name)
    return statistics.fmean(values) if values else None
