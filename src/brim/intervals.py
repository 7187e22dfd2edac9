"""How much faster, and how sure: the ratio of two rates with its 95 % interval, from repeated measurements.

Rates differ by factors, so the arithmetic is on logarithms; few measurements have the wide intervals of Student's t.
Pure: it is given numbers, and reads no file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["Interval", "curve_speed_up", "mean_rate", "paired_speed_up", "segment_seconds", "speed_up"]

SEGMENTS = 10  # of a run: enough for an interval, each long enough to hold several batches
SHORT_RUN_SPREAD = 2.0  # a factor at least: two runs of the same differ by more than the parts of one
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A factor, between which bounds it lies, and how many measurements it rests on; no bounds: measured once."""

    value: float
    low: float | None = None
    high: float | None = None
    measurements: int = 1

    @property
    def clear(self) -> bool:
        """Whether it is faster or slower for sure: the interval lies on one side of 1."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)

    def text(self) -> str:
        """As `1.80× (1.72 to 1.88)`; what is not clear says so."""
        if self.low is None or self.high is None:
            return f"{self.value:.2f}× (measured once: not clear)"
        bounds = f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.value:.2f}× ({bounds})" if self.clear else f"{self.value:.2f}× (not clear: {bounds})"

    def to_json(self) -> dict[str, Any]:
        """The interval as plain JSON values."""
        return {**dataclasses.asdict(self), "clear": self.clear}


def speed_up(before: Sequence[float], after: Sequence[float]) -> Interval:
    """The ratio of two rates, each measured some times; `before` and `after` are samples per second."""
    old, new = ([math.log(rate) for rate in rates] for rates in (before, after))
    difference = statistics.fmean(new) - statistics.fmean(old)
    count = min(len(old), len(new))
    if count < 2:
        return Interval(value=math.exp(difference), measurements=count)
    parts = [statistics.variance(values) / len(values) for values in (old, new)]  # Welch: each side has its own spread
    error = math.sqrt(sum(parts))
    freedom = count - 1.0
    if error > 0:
        weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (old, new), strict=True))
        freedom = error**4 / weights
    return _interval(difference, error, freedom, count)


def paired_speed_up(before: Sequence[float], after: Sequence[float]) -> Interval:
    """The ratio of two runs over the same work, from the seconds that each part of it took in either run."""
    logs = [math.log(old / new) for old, new in zip(before, after, strict=True)]
    value = sum(before) / sum(after)
    if len(logs) < 2:
        return Interval(value=value, measurements=len(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return _interval(math.log(value), error, len(logs) - 1.0, len(logs))


def curve_speed_up(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> tuple[Interval | None, bool]:
    """The ratio of two runs over the same work, from their throughput curves; and whether both have enough points.

    Where one has too few, its time is a single measurement. The other run's parts say how far a single one may be off:
    their spread, as a prediction interval for one more of them, and a factor of 2 at least. Such an interval is wide,
    and only a far larger difference is clear. None: neither has enough points, or they did not do the same work.
    """
    if not before or not after or before[-1][1] != after[-1][1] or min(before[-1][0], after[-1][0]) <= 0:
        return None, False
    old, new = segment_seconds(before), segment_seconds(after)
    if old and new:
        return paired_speed_up(old, new), True
    parts = old or new
    if not parts:
        return None, False
    spread = statistics.stdev([math.log(seconds) for seconds in parts])
    error = spread * math.sqrt(1 + 1 / len(parts))
    log_ratio, freedom = math.log(before[-1][0] / after[-1][0]), len(parts) - 1.0
    error = max(error, math.log(SHORT_RUN_SPREAD) / _quantile(freedom))
    return _interval(log_ratio, error, freedom, 1), False


def mean_rate(rates: Sequence[float]) -> Interval:
    """The rate over several measurements of the same work, in the unit of the rates (no factor: it has no `text`)."""
    value = len(rates) / sum(1 / rate for rate in rates)
    if len(rates) < 2:
        return Interval(value=value, measurements=len(rates))
    error = statistics.stdev([math.log(rate) for rate in rates]) / math.sqrt(len(rates))
    return _interval(math.log(value), error, len(rates) - 1.0, len(rates))


def segment_seconds(curve: Sequence[Sequence[float]], segments: int = SEGMENTS) -> list[float]:
    """The seconds of each equal part of the work, from points (seconds, samples done); empty for a curve too short.

    A part shorter than the distance of two points would be made up, so a curve has at least as many points as parts.
    """
    points = [(0.0, 0.0), *((float(seconds), float(done)) for seconds, done in curve)]
    total = points[-1][1]
    if len(points) <= segments or total <= 0:
        return []
    marks = [_seconds_at(points, total * part / segments) for part in range(segments + 1)]
    found = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return found if all(seconds > 0 for seconds in found) else []


def _seconds_at(points: Sequence[tuple[float, float]], done: float) -> float:
    for (start, before), (end, after) in itertools.pairwise(points):
        if after >= done and after > before:
            return start + (end - start) * max(done - before, 0.0) / (after - before)
    return points[-1][0]


def _interval(log_ratio: float, error: float, freedom: float, count: int) -> Interval:
    reach = _quantile(freedom) * error
    return Interval(
        value=math.exp(log_ratio), low=math.exp(log_ratio - reach), high=math.exp(log_ratio + reach), measurements=count
    )


def _quantile(freedom: float) -> float:
    whole = max(int(freedom), 1)
    return _T[whole - 1] if whole <= len(_T) else statistics.NormalDist().inv_cdf(0.975)
