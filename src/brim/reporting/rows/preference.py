"""What is drawn and tabled of a preference training: method × data set over seeds, each seed's cell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.reporting.units import number, score_text

__all__ = ["METRICS", "best_rows", "cell_rows", "loss_points", "method_rows", "spread_rows"]

METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}  # of the last, lower is better


def method_rows(table: object) -> list[dict[str, Any]]:
    """A row for each method, data set and encoder; each metric as `auroc`, `auroc deviation`, `auroc shown`."""
    rows = []
    for entry in table if isinstance(table, list) else []:
        if not isinstance(entry, dict):
            continue
        seeds = entry.get("seeds")
        row: dict[str, Any] = {
            **{field: str(entry.get(field)) for field in ("data", "encoder", "method")},
            "seeds": seeds if isinstance(seeds, list) else [],
            "failed": number(entry.get("failed")) or 0,
        }
        row["num_seeds"] = len(row["seeds"]) or None
        for name in METRICS:
            figure = entry.get(name)
            figure = figure if isinstance(figure, dict) else {}
            mean, deviation = number(figure.get("mean")), number(figure.get("deviation"))
            values = figure.get("values")
            row |= {
                name: mean,
                f"{name} deviation": deviation,
                f"{name} values": [number(value) for value in values] if isinstance(values, list) else [],
                f"{name} shown": score_text(mean) + ("" if deviation is None else f" ± {score_text(deviation)}"),
            }
        rows.append(row)
    several = len({row["encoder"] for row in rows}) > 1
    for row in rows:
        row["set"] = f"{row['data']}, {row['encoder']}" if several else row["data"]
    return rows


def best_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By data set (and encoder), the method with the highest AUROC."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["auroc"] is not None and (row["set"] not in best or row["auroc"] > best[row["set"]]["auroc"]):
            best[row["set"]] = row
    return best


def spread_rows(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is drawn of a metric: each row's mean with the ends of its deviation, and each seed's value."""
    drawn, dots = [], []
    for row in rows:
        if row[metric] is None:
            continue
        place = {"name": row["method"], "line": row["set"]}
        half = row[f"{metric} deviation"]
        ends = {} if half is None else {"low": row[metric] - half, "high": row[metric] + half}
        drawn.append({**place, "x": row[metric], "shown": row[f"{metric} shown"], "low": None, "high": None, **ends})
        if row[f"{metric} deviation"] is not None:
            dots += [
                {**place, "x": value, "seed": str(seed), "shown": score_text(value)}
                for seed, value in zip(row["seeds"], row[f"{metric} values"], strict=False)
                if value is not None
            ]
    return drawn, dots


def cell_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every cell of the journal: its metrics and, of a head, how its training went."""
    rows = []
    for cell in cells:
        metrics, details = (
            part if isinstance(part, dict) else {} for part in (cell.get("metrics"), cell.get("details"))
        )
        rows.append(
            {
                **{field: cell.get(field) for field in ("method", "data", "encoder", "seed", "lr", "error")},
                **{name: number(metrics.get(name)) for name in METRICS},
                **{
                    name: number(details.get(name))
                    for name in ("epochs", "best_epoch", "validation_auroc", "last_loss", "skipped_steps")
                },
            }
        )
    return rows


def loss_points(cell: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The loss of each epoch of a head, epochs from 1; of what has none, or a number that is none, nothing."""
    details = cell.get("details")
    losses = details.get("losses") if isinstance(details, dict) else None
    known = [number(loss) for loss in losses] if isinstance(losses, list) else []
    return [(float(epoch), loss) for epoch, loss in enumerate(known, start=1) if loss is not None]
