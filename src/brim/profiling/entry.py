"""One point of a profile as a record: its evaluation's figures under the names of docs/interface.md. Pure."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.evaluation.run import EvalResult
from brim.evaluation.setup import EvaluationSetup
from brim.evaluation.timing import StageClock, StageTimes
from brim.memory.failures import FailureKind, classify
from brim.models import hf_knobs
from brim.records import Probe
from brim.running.executor import Pending

__all__ = ["done_entry", "failed_entry", "latency_figures", "mark_saturation", "percentile", "time_single_samples"]


def done_entry(
    point: Mapping[str, Any],
    result: EvalResult,
    *,
    folder: str,
    ceiling: int | None,
    times: Sequence[StageTimes],
    single_times: Sequence[StageTimes],
    started_at: datetime.datetime,
) -> dict[str, Any]:
    """A point that was evaluated; the knobs come first, under their own names."""
    summary, plan = result.summary, result.plan
    metric = next(iter(summary["metrics"]), None)
    accuracy = summary["metrics"].get(metric, {})
    ended_at = datetime.datetime.now(datetime.UTC)
    return {
        **point,
        "state": "done",
        "error": None,
        "folder": folder,
        "metric": metric,
        "accuracy": accuracy.get("value"),
        "accuracy_std": accuracy.get("std"),
        "accuracy_ci95": accuracy.get("ci95"),
        "batch_size_used": summary["batch_size_used"],
        "batch_sizes": summary["batch_sizes"],
        "batch_size_max": None if summary["batch_sizes"] is None else summary["batch_sizes"]["largest"],
        "batch_size_ceiling": ceiling,
        "samples_per_second": summary["samples_per_second"],
        "latency_ms": {
            "batch_1": latency_figures(single_times, batch_size=1),
            "batch_used": latency_figures(times, batch_size=summary["batch_size_used"]),
        },
        "peak_allocated_bytes": summary["peak_allocated_bytes"],
        "peak_reserved_bytes": summary["peak_reserved_bytes"],
        "limit_bytes": None if plan is None else plan.memory.limit_bytes,
        "gpu_utilisation_mean": summary["gpu_utilisation_mean"],
        "gpu_wait_fraction": summary["gpu_wait_fraction"],
        "vision_tokens_mean": _mean(sample.get("vision_tokens") for sample in result.samples),
        "crops_used_mean": _mean(sample.get("crops") for sample in result.samples),
        "saturated": False,
        "num_samples": summary["num_samples"],
        "num_failed": summary["num_failed"],
        "num_resumed": summary["num_resumed"],
        "oom_events": summary["oom_events"],
        "plan_seconds": summary["plan_seconds"],
        "ranks": summary["ranks"],
        "metrics": summary["metrics"],
        "answer_tokens": summary["answer_tokens"],
        "notes": list(result.notes),
        "probes": [] if plan is None else [_probe_row(probe) for probe in plan.probes],
        "started_at": started_at.isoformat(),
        "ended_at": ended_at.isoformat(),
        "duration_seconds": (ended_at - started_at).total_seconds(),
    }


def failed_entry(
    point: Mapping[str, Any], error: str, *, folder: str, exit_code: int, started_at: datetime.datetime
) -> dict[str, Any]:
    """A point that has no figures, and why."""
    ended_at = datetime.datetime.now(datetime.UTC)
    return {
        **point,
        "state": "failed",
        "error": error,
        "exit_code": exit_code,
        "folder": folder,
        "accuracy": None,
        "samples_per_second": None,
        "started_at": started_at.isoformat(),
        "ended_at": ended_at.isoformat(),
        "duration_seconds": (ended_at - started_at).total_seconds(),
    }


def mark_saturation(entries: Sequence[dict[str, Any]], knobs: Sequence[str]) -> list[str]:
    """Mark the points where a larger value of a knob no longer changes what the model sees; returns notes on them."""
    lines: list[str] = []
    for knob in knobs:
        if knob == "dtype" or knob in hf_knobs.NOT_OF_IMAGES:
            continue  # what the model sees does not depend on it, at any value
        marked = []
        for entry in entries:
            below = _next_below(entry, entries, knob, knobs)
            if below is not None and _sees(entry) is not None and _sees(entry) == _sees(below):
                entry["saturated"] = True
                marked.append(entry[knob])
        if marked:
            first = min(marked)
            lines.append(
                f"{knob} is a cap: from {first} on the pictures of this data have no more tokens or crops "
                f"({knob}={', '.join(str(value) for value in sorted(set(marked)))} changed nothing)"
            )
    return lines


def _next_below(
    entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], knob: str, knobs: Sequence[str]
) -> Mapping[str, Any] | None:
    """The point with the next smaller value of one knob, all others equal."""
    value = entry[knob]
    if not isinstance(value, (int, float)):
        return None
    smaller = [
        other
        for other in entries
        if all(other[name] == entry[name] for name in knobs if name != knob)
        and isinstance(other[knob], (int, float))
        and other[knob] < value
    ]
    return max(smaller, key=lambda other: other[knob], default=None)


def _sees(entry: Mapping[str, Any]) -> tuple[float | None, float] | None:
    tokens = entry.get("vision_tokens_mean")
    return None if not tokens else (entry.get("crops_used_mean"), tokens)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _probe_row(probe: Probe) -> dict[str, Any]:
    """A batch that the size was found by; what it was tried for is its phase."""
    return {
        "batch_size": probe.batch_size,
        "cost": probe.cost,
        "verdict": probe.verdict,
        "samples_per_second": probe.samples_per_second,
        "peak_allocated_bytes": probe.peak_allocated_bytes,
        "peak_reserved_bytes": probe.peak_reserved_bytes,
        "phase": probe.detail if probe.fits else None,
        "detail": "" if probe.fits else probe.detail,
    }


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
