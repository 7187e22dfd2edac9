"""The table of a preference training: method × data set, mean and deviation over seeds. Pure functions over cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.metrics.base import mean_and_spread
from brim.metrics.detection import DETECTION_METRICS
from brim.storage.files import csv_text

__all__ = ["Cell", "cells_csv", "metrics_by_seed", "spread", "table_csv", "table_rows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
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
    def key(self) -> tuple[str, str, str, int | None]:
        """What makes it the same cell in another run."""
        return (self.data, self.encoder, self.method, self.seed)

    def to_json(self) -> dict[str, Any]:
        """The cell as plain JSON values."""
        return {
            **dataclasses.asdict(self),
            "metrics": None if self.metrics is None else dict(self.metrics),
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """Read a cell back."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, deviation (n − 1; None for a single value) and each seed's value, in the order of the seeds."""
    found = mean_and_spread(values)
    return {"mean": found["mean"], "deviation": found["std"] if len(values) > 1 else None, "values": list(values)}


def table_rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row for each method, data set and encoder, in order of appearance: each metric's spread over the seeds."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
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


def metrics_by_seed(cells: Sequence[Cell]) -> tuple[dict[str, Any], list[int]]:
    """Each metric's spread over the seeds, and the seeds; over several sets a seed's value is its mean over them.

    Seeds that failed somewhere are left out, so that every value is over the same sets.
    """
    by_seed: dict[int, list[Cell]] = {}
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


def cells_csv(cells: Sequence[Cell]) -> str:
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
