"""The results: cells (one method, data set, encoder and seed), the table over seeds, and run.json's summary. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.metrics.base import mean_and_spread
from brim.metrics.ood_detection import DETECTION_METRICS
from brim.monitor.sampler import MonitorSummary
from brim.settings.molecule_settings import OodRequest
from brim.storage.files import csv_text

__all__ = [
    "CellKey", "ResultCell", "cells_csv", "head_method", "metrics_by_seed", "spread", "summarise", "table_csv",
    "table_rows",
]  # fmt: skip

CellKey = tuple[str, str, str, int | None]  # data set, encoder, method, seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultCell:
    """One method on one data set under one encoder, with one seed (None: it has none)."""

    data: str
    encoder: str
    method: str
    seed: int | None
    lr: float | None = None
    metrics: Mapping[str, float] | None = None
    error: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> CellKey:
        """What makes it the same cell in another run."""
        return (self.data, self.encoder, self.method, self.seed)

    def to_json(self) -> dict[str, Any]:
        """The cell as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ResultCell:
        """Read a cell back."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, deviation (n − 1; None for a single value) and each seed's value, in the order of the seeds."""
    found = mean_and_spread(values)
    return {"mean": found["mean"], "deviation": found["std"] if len(values) > 1 else None, "values": list(values)}


def table_rows(cells: Iterable[ResultCell]) -> list[dict[str, Any]]:
    """A row for each method, data set and encoder, in order of appearance: each metric's spread over the seeds."""
    groups: dict[tuple[str, str, str], list[ResultCell]] = {}
    for cell in cells:
        groups.setdefault((cell.data, cell.encoder, cell.method), []).append(cell)
    rows = []
    for (data, encoder, method), group in groups.items():
        good = [cell for cell in group if cell.metrics is not None]
        row: dict[str, Any] = {
            "data": data,
            "encoder": encoder,
            "method": method,
            "seeds": [cell.seed for cell in good if cell.seed is not None],
            "failed": len(group) - len(good),
        }
        for name in DETECTION_METRICS:
            values = [cell.metrics[name] for cell in good if cell.metrics is not None]
            row[name] = spread(values) if values else None
        rows.append(row)
    return rows


def metrics_by_seed(cells: Sequence[ResultCell]) -> tuple[dict[str, Any], list[int]]:
    """Each metric's spread over the seeds, and the seeds; over several sets a seed's value is its mean over them.

    Seeds that failed somewhere are left out, so that every value is over the same sets.
    """
    by_seed: dict[int, list[ResultCell]] = {}
    for cell in cells:
        if cell.seed is not None:
            by_seed.setdefault(cell.seed, []).append(cell)
    whole = max((len(group) for group in by_seed.values()), default=0)
    seeds = [
        seed
        for seed, group in by_seed.items()
        if len(group) == whole and all(cell.metrics is not None for cell in group)
    ]
    found: dict[str, Any] = {}
    for name in DETECTION_METRICS if seeds else ():
        means = [
            sum(cell.metrics[name] for cell in by_seed[seed] if cell.metrics is not None) / whole for seed in seeds
        ]
        found[name] = spread(means)
    return found, seeds


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as CSV, a column for each mean and deviation."""
    flat = [
        {
            **{name: row[name] for name in ("data", "encoder", "method")},
            "seeds": len(row["seeds"]),
            "failed": row["failed"],
            **{
                f"{name}_{part}": "" if row[name] is None or row[name][part] is None else row[name][part]
                for name in DETECTION_METRICS
                for part in ("mean", "deviation")
            },
        }
        for row in rows
    ]
    return csv_text(flat) if flat else ""


def cells_csv(cells: Sequence[ResultCell]) -> str:
    """Every cell as a line of CSV."""
    flat = [
        {
            "data": cell.data,
            "encoder": cell.encoder,
            "method": cell.method,
            "seed": "" if cell.seed is None else cell.seed,
            "lr": "" if cell.lr is None else cell.lr,
            **{name: "" if cell.metrics is None else cell.metrics[name] for name in DETECTION_METRICS},
            "error": cell.error or "",
        }
        for cell in cells
    ]
    return csv_text(flat) if flat else ""


def head_method(loss: str, lr: float, *, several_lrs: bool) -> str:
    """What the table calls the heads of a loss: `dpo`, `dpo-hinge`, `dpo lr=0.001`."""
    name = "dpo" if loss == "energy" else f"dpo-{loss}"
    return f"{name} lr={lr:g}" if several_lrs else name


def summarise(
    request: OodRequest,
    cells: Sequence[ResultCell],
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
