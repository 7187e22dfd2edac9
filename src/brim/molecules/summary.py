"""The `summary` of a preference training's run.json, from its cells and what was counted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.molecules.cells import head_method
from brim.molecules.table import Cell, metrics_by_seed, table_rows
from brim.monitor.sampler import MonitorSummary
from brim.settings.ood_settings import DpoRequest

__all__ = ["summarise"]


def summarise(
    request: DpoRequest,
    cells: Sequence[Cell],
    *,
    encodings: Sequence[Mapping[str, Any]],
    trainings: Sequence[Mapping[str, Any]],
    failures: Mapping[str, Mapping[str, str]],
    notes: Sequence[str],
    monitor: MonitorSummary,
    seconds: float,
) -> dict[str, Any]:
    """Metrics of the first loss asked for, over seeds; the whole table; sizes, rates and peaks of all trainings."""
    method = head_method(request.losses[0], request.lrs[0], several_lrs=len(request.lrs) > 1)
    metrics, seeds = metrics_by_seed([cell for cell in cells if cell.method == method])
    train_seconds = sum(one["train_seconds"] for one in trainings)
    return {
        "method": method,
        "metrics": metrics,
        "seeds": seeds,
        "table": table_rows(cells),
        "num_cells": len(cells),
        "num_failed": sum(cell.error is not None for cell in cells),
        "errors": [cell.error for cell in cells if cell.error is not None],
        "molecules_left_out": {name: dict(found) for name, found in failures.items()},
        "samples": sum(one["samples"] for one in trainings),
        "samples_per_second": sum(one["samples"] for one in trainings) / train_seconds if train_seconds else None,
        "pairs_per_second": sum(one["pairs"] for one in trainings) / train_seconds if train_seconds else None,
        "effective_batch_size": _largest(one["effective_batch_size"] for one in trainings),
        "micro_batch_size": _smallest(one["micro_batch_size"] for one in trainings),
        "accumulation_steps": _largest(one["accumulation_steps"] for one in trainings),
        "eval_batch_size": _largest(one["eval_batch_size"] for one in trainings),
        "batch_size_used": _smallest(one["micro_batch_size"] for one in trainings),
        "fast_path": ", ".join(dict.fromkeys(one["fast_path"] for one in trainings)) or None,
        "oom_events": sum(one["oom_events"] for one in (*encodings, *trainings)),
        "peak_allocated_bytes": _largest(one["peak_allocated_bytes"] for one in trainings),
        "peak_reserved_bytes": _largest(one["peak_reserved_bytes"] for one in trainings),
        "peaks": {
            "encoding": _peaks(encodings),
            "training": _peaks(trainings),
            "evaluation": _peaks(trainings, prefix="eval_"),
        },
        "trainings": [dict(one) for one in trainings],
        "encodings": [dict(one) for one in encodings],
        "gpu_utilisation_mean": monitor.gpu_utilisation_mean,
        "monitor": monitor.to_json(),
        "seconds": seconds,
        "notes": list(notes),
    }


def _peaks(records: Sequence[Mapping[str, Any]], *, prefix: str = "") -> dict[str, int | None]:
    return {
        name: _largest(one[f"{prefix}{name}"] for one in records)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes")
    }


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
