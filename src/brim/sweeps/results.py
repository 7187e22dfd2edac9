"""A sweep's results as rows: one for each experiment, one for each epoch. Pure, and CSV on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from brim.settings.grid import Experiment
from brim.settings.nested_keys import flatten
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import Outcome

__all__ = ["Goal", "Result", "choose_goal", "detail_rows", "first_line", "result_row", "sorted_results"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """An experiment and what became of it so far."""

    experiment: Experiment
    outcome: Outcome | None = None  # None: it has not ended
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


def first_line(text: str) -> str:
    """Of an error that says more."""
    return text.strip().splitlines()[0] if text.strip() else ""
