"""What batches cost: from the batches that a run timed, and from other runs of the same work."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brim.advice.base import figure
from brim.advice.run_reader import Run, entries, open_run, value_at
from brim.errors import BrimError
from brim.sizing.plans import PlanCache
from brim.units import number

__all__ = [
    "MeasuredRate",
    "gain_of_larger_batches",
    "padded_share",
    "probe_rates",
    "rates_of_cached_plans",
    "rates_of_same_work",
    "runs_beside",
]

FEWEST_TIMED = 4  # batches, for a line through their times
LEAST_CONTRAST = 1.5  # of the padded cost of a sample, between batches
USUAL_FIXED_SHARE = 0.5  # of a batch's time that does not grow with it, where nothing else is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """How fast some batch size was, and where that was measured."""

    batch_size: int
    samples_per_second: float
    source: str
    given: bool = False  # the size was given; else brim found it


def probe_rates(run: Run) -> list[MeasuredRate]:
    """The batches that a run timed, the first left out where there are others: it loads kernels, whatever its size."""
    rates = [
        MeasuredRate(batch_size=int(size), samples_per_second=rate, source="this run")
        for probe in entries(run.plan.get("probes"))
        if probe.get("verdict") == "fits"
        and (size := number(probe.get("batch_size")))
        and (rate := number(probe.get("samples_per_second")))
    ]
    return rates[1:] if len(rates) > 1 else rates


def gain_of_larger_batches(run: Run, factor: float) -> tuple[float, bool]:
    """The gain where every batch holds so many times more samples, and whether timings of two sizes are behind it."""
    times = {one.batch_size: one.batch_size / one.samples_per_second for one in probe_rates(run)}
    size = float(run.summary.get("batch_size_used") or 1)
    if len(times) > 1:
        small, large = min(times), max(times)
        slope = max((times[large] - times[small]) / (large - small), 0.0)
        fixed = max(times[small] - slope * small, 0.0)
        before, after = fixed / size + slope, fixed / (size * factor) + slope
        if before > 0 and after > 0:
            return before / after, True
    return factor / (USUAL_FIXED_SHARE + (1 - USUAL_FIXED_SHARE) * factor), False


def padded_share(run: Run) -> tuple[float, float]:
    """Of the time in batches, the part that grows with their padded cost: at least, and at most.

    Seconds of a batch are taken as `a · samples + b · padded cost`, fitted by least squares of relative errors, neither
    below 0. At least `b` times the run's padded cost grows with it, and at most everything but `a` times its samples.
    What lies between is what the fit does not explain: the first batch, which is not part of it, since it warms up, and
    costs that grow faster than the padded one. Where batches are too few or too alike, nothing is known.
    """
    rates = _fitted_seconds(value_at(run.summary, "batch_times.batches"))
    padded, busy = figure(run, "batch_times.padded_cost"), figure(run, "batch_times.busy_seconds")
    samples = (figure(run, "num_samples") or 0.0) - (figure(run, "num_resumed") or 0.0)
    if rates is None or not padded or not busy or samples <= 0:
        return 0.0, 1.0
    each, by_cost = rates
    whole = max(busy, each * samples + by_cost * padded)
    return by_cost * padded / whole, 1 - each * samples / whole


def _fitted_seconds(recorded: Any) -> tuple[float, float] | None:
    """Seconds of a sample and of a unit of padded cost; None where batches are too few or too alike."""
    rows = [
        [number(one) for one in row]
        for row in (recorded if isinstance(recorded, list) else ())
        if isinstance(row, list) and len(row) == 3
    ]
    known = [(n, cost, seconds) for n, cost, seconds in rows if n and cost and seconds and min(n, cost, seconds) > 0]
    lengths = [cost / n for n, cost, _ in known]
    if len(known) < FEWEST_TIMED or max(lengths) < LEAST_CONTRAST * min(lengths):
        return None
    xs, ys = [n / seconds for n, _, seconds in known], [cost / seconds for _, cost, seconds in known]
    xx, xy, yy = (sum(map(operator.mul, *pair)) for pair in ((xs, xs), (xs, ys), (ys, ys)))
    determinant = xx * yy - xy * xy
    if determinant <= 0:
        return None
    each, by_cost = (sum(xs) * yy - sum(ys) * xy) / determinant, (sum(ys) * xx - sum(xs) * xy) / determinant
    if each < 0:
        return 0.0, sum(ys) / yy
    return (sum(xs) / xx, 0.0) if by_cost < 0 else (each, by_cost)


def rates_of_same_work(run: Run) -> list[MeasuredRate]:
    """Evaluations beside this one of the same model, data and settings, whatever their batch size."""
    return [
        MeasuredRate(
            batch_size=int(size), samples_per_second=rate, source=other.folder.name,
            given=other.request.get("batch_size") is not None,
        )
        for other in runs_beside(run)
        if other.kind == run.kind
        and other.summary.get("fingerprint") == run.summary.get("fingerprint")
        and (size := number(other.summary.get("batch_size_used")))
        and (rate := number(other.summary.get("samples_per_second")))
    ]  # fmt: skip


def rates_of_cached_plans(run: Run) -> list[MeasuredRate]:
    """Sizes that an earlier evaluation of the model tried on the same device, as rates of this run's samples.

    The data may have other lengths, so that batches are compared by their cost: tokens a second, where cost is tokens.
    """
    own = [(cost, seconds) for cost, seconds, _ in _costs(run.plan.get("probes"))]
    size, rate = number(run.summary.get("batch_size_used")), number(run.summary.get("samples_per_second"))
    if not own or not size or not rate:
        return []
    speed = max(cost / seconds for cost, seconds in own)
    model, task = str(run.request.get("model")).removeprefix("hf:"), run.request.get("task")
    return [
        MeasuredRate(batch_size=count, samples_per_second=rate * cost / seconds / speed, source="a cached plan")
        for one in PlanCache().entries()
        if one.command == "eval" and one.model.removeprefix("hf:") == model and one.work == task
        and one.plan.device == run.plan.get("device")
        for cost, seconds, count in _costs([probe.to_json() for probe in one.plan.probes])
    ]  # fmt: skip


def _costs(probes: object) -> list[tuple[float, float, int]]:
    """Cost, seconds and samples of the batches that ran."""
    return [
        (cost, seconds, int(size))
        for probe in entries(probes)
        if probe.get("verdict") == "fits"
        and (cost := number(probe.get("cost")))
        and (seconds := number(probe.get("step_seconds")))
        and (size := number(probe.get("batch_size")))
    ]


def runs_beside(run: Run) -> Iterator[Run]:
    """The finished runs in the same parent folder."""
    for file in sorted(Path(run.folder.resolve().parent).glob("*/run.json")):
        if file.parent != run.folder.resolve():
            try:
                yield open_run(file.parent)
            except BrimError:  # damaged, or of another version: no evidence
                continue
