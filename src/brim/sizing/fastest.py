"""Probing for the fastest size: the smallest one whose rate is within tolerance of the best in reach, if it is clearly
smaller than the best one.

Two or three probes give the bytes over size and a first idea of speed; one near the limit shows what the card can
give; the step times in between say where the knee should be, and one more probe checks it. A larger batch that
brings nothing ends the climb early.
"""

from __future__ import annotations

import math

from brim.sizing.constants import (
    CLEARLY_SMALLER,
    FIRST_LIMIT_FRACTION,
    FIRST_REPLAY_PART,
    FORECAST_REACH,
    FORECAST_RESOLUTION,
    KNEE_ABOVE,
    KNEE_BELOW,
    KNEE_SPARES,
    LATER_LEAP,
    LONGEST_LOOK_SECONDS,
    LONGEST_STEP_SECONDS,
    MAX_FORECAST_ERROR,
    MOST_FAILED_CLIMBS,
    MOST_KNEE_PROBES,
    SECOND_LEAP,
    SECOND_REPLAY_HEADROOM,
    STEP_BACK,
    STEP_BACK_SURPRISED,
    TRUSTED_ALLOCATED_ERROR,
    TRUSTED_RESERVED_ERROR,
    USABLE_LIMIT_FRACTION,
    WORTH_A_CLIMB,
    WORTH_A_CLIMB_AFTER_FORECAST,
)
from brim.sizing.priors import ForecastCurve
from brim.sizing.sizer import Evidence, ProbingSizer, SizeGrid, Trial

__all__ = ["FastestSizer"]


class FastestSizer(ProbingSizer):
    """Finds the smallest size within `tolerance` of the best rate in reach.

        sizer = FastestSizer(evidence, grid=grid, tolerance=0.02)
        while not sizer.settled:
            sizer.record(probe(sizer.next_size()))
        sizer.chosen()

    `usable` is the fraction of the limit that the probe near it may fill: near the brim an allocator retries before it
    fails. `forecast` is what the evidence's bytes have as their prior, and more.
    """

    def __init__(
        self,
        evidence: Evidence,
        *,
        grid: SizeGrid,
        tolerance: float = 0.02,
        usable: float = USABLE_LIMIT_FRACTION,
        forecast: ForecastCurve | None = None,
    ) -> None:
        self.tolerance = tolerance
        self.usable = usable
        self._forecast = forecast
        self._at_the_brim = False  # the forecast has led to the largest size that should run
        self._fitting: dict[int, Trial] = {}
        self._failed_climbs = 0
        self._looked = False  # near the limit
        self._looked_below = False  # the smallest size tried
        # Until the forecast has led near the limit, or has shown to be wrong.
        self._forecast_counts = evidence.bytes.prior is not None
        self._knee_probes = 0
        super().__init__(evidence, grid)

    def chosen(self) -> Trial | None:
        """The smallest fitting size within tolerance of the best rate seen, if it is clearly smaller than the best."""
        smallest, best = self._smallest_good(), self.best()
        if smallest is None or best is None:
            return None
        return smallest if smallest.size <= CLEARLY_SMALLER * best.size else best

    def best(self) -> Trial | None:
        """The fitting size with the best rate seen."""
        return max(self._fitting.values(), key=lambda trial: trial.rate, default=None)

    def _take(self, trial: Trial) -> None:
        self._observe(trial)
        if trial.fits:
            self._fitting[trial.size] = trial
            self.largest = max(self.largest, trial.size)
        else:
            self._failed_climbs += 1

    def _propose(self) -> int | None:
        if not self._fitting:
            return self._first()
        for stage in (self._leap, self._learn, self._climb, self._knee):
            size = stage()
            if size is not None:
                return size
        return None

    def _smallest_good(self) -> Trial | None:
        goal = (1 - self.tolerance) * self._best_rate()
        return next((trial for trial in self._by_size() if trial.rate >= goal), None)

    def _first(self) -> int | None:
        """The smallest size; with a forecast one that should take a small part of the limit, unless that has failed."""
        if self._fails_from <= self.grid.first or self._bytes.points:
            return None
        if self._bytes.prior is None or self._failed_climbs:
            return self.grid.first
        start = self._bytes.largest_within(round(FIRST_LIMIT_FRACTION * self._limit_bytes)) or 0
        near = self._bytes.largest_within(round(self.usable * self._limit_bytes)) or 0  # within one leap of the first
        least = math.ceil(min(near, self.grid.last) / LATER_LEAP)
        return max(self.grid.floor(start), self.grid.floor(least + self.grid.multiple_of - 1), self.grid.first)

    def _leap(self) -> int | None:
        """With a forecast: from the first size, which corrects it, to one that should be near the limit.

        Where the first size has shown the forecast to be right, that is the largest that should run. If it fails, and
        where the forecast had to be corrected, it is one that leaves some of the limit.
        """
        if not self._forecast_counts:
            return None
        failed = self._looked and self._failed_climbs == 1
        if self._looked != failed or (self._failed_climbs and not failed):
            self._forecast_counts = False
            return None
        if not 1 / MAX_FORECAST_ERROR <= self._bytes.prior_error() <= MAX_FORECAST_ERROR:
            self._forecast_counts = False
            return None
        foreseen = self._forecast_reach()
        size = self.grid.floor(self._reach(FORECAST_REACH) if foreseen is None else foreseen)
        self._forecast_counts = foreseen is not None
        if not self.grid.up(self.largest) <= size < self._fails_from:
            return None
        self._looked = True
        self._at_the_brim = foreseen is not None and foreseen < self._bearable() - 1
        return size

    def _learn(self) -> int | None:
        """Up to three sizes: the smallest, and twice one half of what a line through the points so far allows.

        The first line starts at what is resident. Bytes that bend upwards too sharply for half a line cost one
        out-of-memory error, after which the climb continues below it. Where steps take seconds, as on a CPU, the third
        size ends where one would be longer than is worth it.
        """
        if len(self._fitting) >= 3 or self._failed_climbs or self._looked:
            return None
        if len(self._fitting) == 1:
            straight: float = self._bytes.proportionally_within(self._limit_bytes)
            leap = SECOND_LEAP
        else:
            straight = self._bytes.largest_within(self._limit_bytes) or self.grid.last  # None: flat so far
            leap = LATER_LEAP
        reach = min(max(self._bytes.surely_within(self._limit_bytes), straight / 2), self.largest * leap)
        reach = min(reach, self._within_seconds())
        if len(self._fitting) == 2 and reach < 1.5 * self.largest:
            return None  # the limit is near: climb
        size = self.grid.between(reach, self.largest, self._fails_from)
        return size if size < self._fails_from else None

    def _climb(self) -> int | None:
        """A size near the limit: while it promises more, and once for its own sake if that takes little time."""
        if self._failed_climbs >= MOST_FAILED_CLIMBS or (self._at_the_brim and not self._failed_climbs):
            return None
        foreseen = self._forecast_reach()
        reach = self._reach(self.usable) if foreseen is None else foreseen
        if self._failed_climbs:  # step back: a little from a failure near the limit, half-way from a surprising one
            surprising = len(self._fitting) < 3 or self._failed_climbs > 1
            back = STEP_BACK_SURPRISED if surprising else STEP_BACK
            reach = min(reach, self._fails_from - back * (self._fails_from - self.largest))
        size = self.grid.floor(reach)
        worth = WORTH_A_CLIMB if self._bytes.prior is None else WORTH_A_CLIMB_AFTER_FORECAST
        if size >= self._fails_from or size < max(self.largest * worth, self.grid.up(self.largest)):
            return None
        seconds = self._expected_seconds(size)
        promising = not self._saturated() and size / seconds >= (1 + self.tolerance / 2) * self._best_rate()
        if promising or (not self._looked and seconds <= LONGEST_LOOK_SECONDS):
            self._looked = True
            self._at_the_brim = foreseen is not None and foreseen < self._bearable() - 1
            return size
        return None

    def _forecast_reach(self) -> int | None:
        """The largest size that should run under the limit; None without a forecast that has shown to be right.

        It lies beyond where a line through reserved bytes meets the limit: an allocator that is short of memory puts
        to use what it would otherwise keep idle. So what is in use has to be right, and what is reserved nearly.
        """
        forecast, seen = self._forecast, self._by_size()[-1]
        if forecast is None or self._failed_climbs:
            return None
        in_use = (seen.allocated_bytes or 0) / max(forecast.allocated_at(seen.size), 1)
        reserved = (seen.peak_bytes or 0) / max(forecast.reserved_at(seen.size), 1)
        if abs(in_use - 1) > TRUSTED_ALLOCATED_ERROR or abs(reserved - 1) > TRUSTED_RESERVED_ERROR:
            return None
        limits = [round(share * self._limit_bytes) for share in (self.usable, 1 - SECOND_REPLAY_HEADROOM)]
        high = min(math.ceil(self._bearable()), self.grid.last) + 1
        low = min(max(self.largest, math.floor(self._reach(FORECAST_REACH))), high - 1)
        leap = max(low // FIRST_REPLAY_PART, 1)  # replays take time: upwards by doubling leaps, then by halves
        while high - low > max(low // FORECAST_RESOLUTION, 1):
            middle = min(low + leap, (low + high) // 2)
            runs = all(forecast.runs_within(middle, limit) for limit in limits)
            low, high = (middle, high) if runs else (low, middle)
            leap *= 2
        return low

    def _expected_seconds(self, size: int) -> float:
        """The step time at a larger size, if step times continue in a line through the last two."""
        trials = self._by_size()
        seconds = trials[-1].seconds or 0.0
        if len(trials) > 1:
            fixed, per_item = _seconds_line(trials[-2], trials[-1])
            seconds = max(seconds, fixed + per_item * size)
        return max(seconds, 1e-9)

    def _best_rate(self) -> float:
        best = self.best()
        return 0.0 if best is None else best.rate

    def _reach(self, share: float) -> float:
        """The largest size that the bytes, within a share of the limit, and a step of bearable length allow."""
        within = self._bytes.largest_within(round(self._limit_bytes * share))
        by_bytes = self.grid.last if within is None else within
        return min(by_bytes, self._bearable(), self.grid.last)

    def _bearable(self) -> float:
        """The largest size with a step of bearable length, and not too far from what was seen."""
        last = self._by_size()[-1].seconds or 0.0
        by_time = self._longest_seconds() / last if last else LATER_LEAP
        return self.largest * min(by_time, LATER_LEAP)

    def _within_seconds(self) -> float:
        """The size at which a line through the last two step times is no longer bearable; before two, any."""
        if len(self._fitting) < 2:
            return math.inf
        fixed, per_item = _seconds_line(*self._by_size()[-2:])
        return (self._longest_seconds() - fixed) / per_item if per_item > 0 else math.inf

    def _longest_seconds(self) -> float:
        """Of a step that is worth a probe."""
        return max(LONGEST_STEP_SECONDS, 4 * (self._by_size()[0].seconds or 0.0))

    def _knee(self) -> int | None:
        """A size between the smallest good one and the one below it, where step times say the knee is."""
        good, best = self._smallest_good(), self.best()
        if good is None or best is None or self._knee_probes >= MOST_KNEE_PROBES:
            return None
        below = [trial for trial in self._by_size() if trial.size < good.size]
        if not below:
            return self._below_the_smallest(good)
        size = _where_rate_reaches((1 - self.tolerance / 2) * best.rate, below[-1], good)
        size = self.grid.floor(size + self.grid.multiple_of - 1)
        if not below[-1].size * KNEE_ABOVE < size <= min(CLEARLY_SMALLER * best.size, KNEE_BELOW * good.size):
            return None
        spared = (good.peak_bytes or 0) - (self._bytes.bytes_at(size) or 0)
        if spared < KNEE_SPARES * self._limit_bytes:
            return None
        self._knee_probes += 1
        return size

    def _below_the_smallest(self, good: Trial) -> int | None:
        """With a forecast the smallest size tried may be fast already: look once at an eighth of it."""
        if self._bytes.prior is None or self._looked_below or good.size <= self.grid.first:
            return None
        self._looked_below = True
        return max(self.grid.floor(good.size / 8), self.grid.first)

    def _saturated(self) -> bool:
        """Whether doubling the size, or more, brought less than half the tolerance.

        Never said of the first two sizes: those run for milliseconds, and a busy host hides what they gain.
        """
        trials = self._by_size()
        if len(trials) < 3:
            return False
        smaller, larger = trials[-2], trials[-1]
        grown = larger.size >= 2 * smaller.size
        return grown and larger.rate <= smaller.rate * (1 + self.tolerance / 2)

    def _by_size(self) -> list[Trial]:
        return [self._fitting[size] for size in sorted(self._fitting)]


def _seconds_line(low: Trial, high: Trial) -> tuple[float, float]:
    """The line of step time over size through two probes: seconds of a step that carries nothing, and per item."""
    assert low.seconds is not None
    assert high.seconds is not None
    per_item = (high.seconds - low.seconds) / (high.size - low.size)
    return low.seconds - per_item * low.size, per_item


def _where_rate_reaches(rate: float, low: Trial, high: Trial) -> float:
    """The size between two probes where the rate is reached, if step time is affine between them."""
    fixed, per_item = _seconds_line(low, high)
    if 1 - rate * per_item <= 0:
        return high.size
    return min(max(rate * fixed / (1 - rate * per_item), low.size), high.size)
