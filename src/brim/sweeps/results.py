"""A sweep's results: rows of results.csv and details.csv, and sweep.json with what pairing has saved. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import first_line
from brim.settings.grid import Expansion, Experiment
from brim.settings.nested_keys import flatten
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import AttemptOutcome

__all__ = [
    "SWEEP_SCHEMA", "Goal", "Result", "choose_goal", "detail_rows", "preview_document", "result_row",
    "sorted_results", "sweep_document", "time_saved",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """An experiment and its state so far."""

    experiment: Experiment
    outcome: AttemptOutcome | None = None  # None: it has not ended
    forecast: SizeForecast | None = None
    attempts: int = 0
    device: str = ""
    folder: str = ""

    @property
    def state(self) -> str:
        """completed, failed, interrupted or waiting."""
        return "waiting" if self.outcome is None else self.outcome.state

    def figure(self, name: str) -> Any:
        """A figure of its training run; None where it is not known."""
        return None if self.outcome is None else self.outcome.figures.get(name)

    def metric(self, name: str, when: str = "best") -> float | None:
        """A metric of its best or last epoch."""
        value = (self.figure(when) or {}).get(name)
        return value if isinstance(value, (int, float)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What experiments are compared by."""

    metric: str
    higher_is_better: bool


def choose_goal(results: Sequence[Result]) -> Goal | None:
    """Accuracy where there is one, else the validation's loss, else the training's; None before the first result."""
    known = {name for result in results for name in (result.figure("best") or {})}
    for metric, higher in (("top1", True), ("accuracy", True), ("val_loss", False), ("train_loss", False)):
        if metric in known:
            return Goal(metric=metric, higher_is_better=higher)
    return Goal(metric=min(known), higher_is_better=True) if known else None


def sorted_results(results: Sequence[Result], goal: Goal | None) -> list[Result]:
    """The best first; those without the metric last, in the file's order."""
    if goal is None:
        return list(results)

    def key(result: Result) -> tuple[bool, float]:
        value = result.metric(goal.metric)
        if value is None or value != value:
            return True, 0.0
        return False, -value if goal.higher_is_better else value

    return sorted(results, key=key)


def result_row(result: Result) -> dict[str, Any]:
    """One row of results.csv: nested keys flattened, metrics of the best and the last epoch, how it ran and ended."""
    outcome, forecast = result.outcome, result.forecast
    row: dict[str, Any] = {"id": result.experiment.id, "state": result.state}
    row |= flatten(result.experiment.settings)
    for when in ("best", "final"):
        row |= {f"{when}_{name}": value for name, value in (result.figure(when) or {}).items()}
    row |= {
        "best_epoch": result.figure("best_epoch"),
        "epochs_trained": result.figure("epochs"),
        "steps": result.figure("steps"),
        "samples_per_second": result.figure("samples_per_second"),
        "batch_size_planned": None if forecast is None else forecast.batch_size,
        "batch_size_used": result.figure("batch_size_used"),
        "batch_size_reason": "" if outcome is None else outcome.batch_size_reason,
        "effective_batch_size": result.figure("effective_batch_size"),
        "oom_events": result.figure("oom_events"),
        "forecast_bytes": None if forecast is None else forecast.peak_reserved_bytes,
        "peak_allocated_bytes": result.figure("peak_allocated_bytes"),
        "peak_reserved_bytes": result.figure("peak_reserved_bytes"),
        "seconds": None if outcome is None else round(outcome.seconds, 3),
        "attempts": result.attempts,
        "device": result.device,
        "failure": "" if outcome is None else outcome.failure,
        "error": "" if outcome is None else first_line(outcome.error),
        "folder": result.folder,
    }
    return row


def detail_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for every epoch of every experiment that has ended."""
    return [
        {"id": result.experiment.id, **epoch}
        for result in results
        if result.outcome is not None
        for epoch in result.outcome.epochs
    ]


SWEEP_SCHEMA = "brim.sweep/1"


def preview_document(
    expansion: Expansion, forecasts: Mapping[str, SizeForecast], *, file: str, seconds: float | None = None
) -> dict[str, Any]:
    """What a sweep would do."""
    document = expansion.to_json()
    for entry in document["experiments"]:
        forecast = forecasts.get(entry["id"])
        entry["forecast"] = None if forecast is None else forecast.to_json()
    return {"schema": SWEEP_SCHEMA, "file": file, **document, "forecast_seconds": seconds}


def sweep_document(
    expansion: Expansion, results: Sequence[Result], *, file: str, interrupted: bool = False
) -> dict[str, Any]:
    """What a sweep did: the preview's fields, and a result in every experiment."""
    forecasts = {one.experiment.id: one.forecast for one in results if one.forecast is not None}
    document = preview_document(expansion, forecasts, file=file)
    by_id = {result.experiment.id: result for result in results}
    for entry in document["experiments"]:
        entry["result"] = _result_json(by_id[entry["id"]])
    goal = choose_goal(results)
    best = sorted_results(results, goal)
    counts = {state: sum(one.state == state for one in results) for state in ("completed", "failed", "interrupted")}
    counts["waiting"] = len(results) - sum(counts.values())
    state = "interrupted" if interrupted else "failed" if counts["failed"] else "completed"
    return {
        **document,
        "state": state,
        "counts": counts,
        "metric": None if goal is None else {"name": goal.metric, "higher_is_better": goal.higher_is_better},
        "ranking": [one.experiment.id for one in best if goal and one.metric(goal.metric) is not None],
        "time_saved": time_saved(results, whole=expansion.total, product=expansion.product),
        "failures": [
            {"id": one.experiment.id, "failure": one.outcome.failure, "error": one.outcome.error}
            for one in results
            if one.outcome is not None and one.outcome.state == "failed"
        ],
    }


def time_saved(results: Sequence[Result], *, whole: int | None, product: int) -> dict[str, Any]:
    """The whole grid against every list crossed: so many experiments less, at the mean time of those that were run.

    What `--max-experiments` leaves out is not saved, only put off.
    """
    seconds = [one.outcome.seconds for one in results if one.outcome is not None and one.outcome.state == "completed"]
    spent = math.fsum(seconds)
    mean = spent / len(seconds) if seconds else None
    count = len(results) if whole is None else whole
    more = max(product - count, 0)
    return {
        "experiments": count,
        "experiments_full_product": product,
        "fraction": more / product if product else 0.0,
        "experiment_seconds": spent,
        "seconds_saved_estimate": None if mean is None else mean * more,
    }


def _result_json(result: Result) -> dict[str, Any]:
    outcome = result.outcome
    return {
        **({} if outcome is None else dict(outcome.figures)),
        "state": result.state,
        "attempts": result.attempts,
        "device": result.device,
        "folder": result.folder,
        "failure": None if outcome is None else outcome.failure or None,
        "error": None if outcome is None else outcome.error or None,
        "seconds": None if outcome is None else outcome.seconds,
        "batch_size_reason": None if outcome is None else outcome.batch_size_reason or None,
    }
