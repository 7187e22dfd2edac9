"""sweep.json: the experiments, how they were paired, what became of each, and what pairing has saved. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.settings.grid import Expansion
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.results import Result, choose_goal, sorted_results

__all__ = ["SWEEP_SCHEMA", "preview_document", "sweep_document", "time_saved"]

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
