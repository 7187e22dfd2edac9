"""Latency of batches: percentiles of what the clock saw, and a short run of single samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from brim.evaluation.setup import EvaluationSetup
from brim.evaluation.timing import StageClock, StageTimes
from brim.memory.failures import FailureKind, classify
from brim.running.executor import Pending

__all__ = ["latency_figures", "percentile", "time_single_samples"]

STAGES = ("total", "vision", "prefill", "decode")
PERCENTILES = (50, 95, 99)
WARM_UP = 2
_NEAR = 0.75  # of the size used: a smaller batch is not one of that size


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile; None where there are too few values for one to lie above it."""
    if len(values) * (100 - percent) < 100:
        return None
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def latency_figures(times: Sequence[StageTimes], *, batch_size: int | None) -> dict[str, Any] | None:
    """Percentiles of every stage over the batches of about this size, in milliseconds; a batch's time is undivided.

    None without such a batch. A stage that the model has not, and a percentile with too few batches, are None.
    """
    if batch_size is None:
        return None
    near = [one for one in times if _NEAR * batch_size <= one.batch_size <= batch_size / _NEAR]
    settled = [one for one in near if one.settled]
    chosen = settled if len(settled) > 1 else near
    if not chosen:
        return None
    figures: dict[str, Any] = {"batch_size": batch_size, "num_batches": len(chosen)}
    for stage in STAGES:
        values = [value for one in chosen if (value := getattr(one, f"{stage}_ms")) is not None]
        figures[stage] = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES} if values else None
    return figures


def time_single_samples(setup: EvaluationSetup, count: int) -> list[StageTimes]:
    """Up to so many samples, one at a time, spread over the data; what cannot be prepared or does not fit is left out.

    Their answers are thrown away: this is about time, and every sample has been answered.
    """
    total = len(setup.costs)
    places = [(2 * step + 1) * total // (2 * min(count, total)) for step in range(min(count, total))]
    clock = StageClock(setup.device, setup.model.module, generates=setup.task.unit == "tokens")
    with clock:
        for item in places[:WARM_UP]:
            _answer(setup, item)
        for item in places:
            _answer(setup, item, clock)
    return clock.times()


def _answer(setup: EvaluationSetup, item: int, clock: StageClock | None = None) -> None:
    try:
        prepared = setup.task.prepare(item)
    except ValueError:
        return  # its failure is on record already
    try:
        if clock is None:
            _wait(setup.task.launch([item], [prepared]))
        else:
            with clock.batch(1):
                pending = setup.task.launch([item], [prepared])
            _wait(pending)
    except Exception as error:
        if classify(error).kind is not FailureKind.OUT_OF_MEMORY:
            raise


def _wait(pending: Pending) -> None:
    pending.result()
