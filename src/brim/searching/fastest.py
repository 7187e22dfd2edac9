"""The search for the fastest size: the smallest one whose throughput is within tolerance of the best in reach, if it is
clearly smaller than the best one.

Two or three probes give the byte model and a first idea of speed; one near the limit shows what the card can
give; the step times in between say where the knee should be, and one more probe checks it. A larger batch that
brings nothing ends the climb early.

Pure: no device, no clock.
"""

from __future__ import annotations

import math

from brim.forecasting.byte_model import ByteModel
from brim.forecasting.forecast_curve import ForecastCurve
from brim.records import Probe
from brim.searching.size_grid import SizeGrid

__all__ = ["FastestSearch"]

CLEARLY_SMALLER = 0.5  # of the best size: speed is not given up for less memory than that spares
KNEE_PROBES = 1  # at most this many probes go into moving the knee down
FAILED_CLIMBS = 4  # at most this many sizes near the limit may fail
SECOND_LEAP = 64  # the second size is at most this many times the first
LONGEST_LEAP = 16  # and every later one this many times the largest that fits
LONGEST_LOOK_SECONDS = 1.0  # near the limit, only to know the largest size, a step may take this long
LONGEST_STEP_SECONDS = 10.0  # a step longer than this is not worth a probe, unless small ones are long too
FORECAST_START = 1 / 16  # with a forecast the first size is the one that should take this fraction of the limit,
FORECAST_REACH = 0.9  # and the second one that should take this; a forecast can be off
FORECAST_STEPS = 100  # a size near the limit is worked out to one part in so many
MORE_HEADROOM = 0.05  # of the limit is left free in a second replay: what runs in both has not just been lucky
RIGHT, NEARLY_RIGHT = 0.03, 0.2  # a forecast off by no more at the largest size seen, in use and reserved, leads on
MOST_OFF = 2.0  # a forecast that its first size shows to be off by more than this factor is forgotten


class FastestSearch:
    """Finds the smallest size within `tolerance` of the best throughput in reach.

        search = FastestSearch(ByteModel(), limit_bytes=limit, grid=grid, tolerance=0.02)
        while (size := search.next_size()) is not None:
            search.tell(probe(size))
        search.chosen()

    `headroom` is the fraction of the limit that the probe near it leaves free: near the brim an
    allocator thrashes before it fails. `forecast` is what `model` has as its prior, and more.
    """

    def __init__(
        self,
        model: ByteModel,
        *,
        limit_bytes: int,
        grid: SizeGrid,
        tolerance: float = 0.02,
        headroom: float = 0.03,
        forecast: ForecastCurve | None = None,
    ) -> None:
        self.model = model
        self.limit_bytes = limit_bytes
        self.grid = grid
        self.tolerance = tolerance
        self.headroom = headroom
        self._forecast = forecast
        self._at_the_brim = False  # the forecast has led to the largest size that should run
        self._fitting: dict[int, Probe] = {}
        self._fails = grid.last + 1
        self._failed_climbs = 0
        self._looked = False  # near the limit
        self._looked_below = False  # the smallest size tried
        self._forecast_counts = model.prior is not None  # until it has led near the limit, or has shown to be wrong
        self._knee_probes = 0

    def next_size(self) -> int | None:
        """The size to probe next, or None when the choice is made."""
        if not self._fitting:
            return self._first()
        for stage in (self._leap, self._learn, self._climb, self._knee):
            size = stage()
            if size is not None:
                return size
        return None

    def tell(self, probe: Probe) -> None:
        """Take in the outcome of the size asked for."""
        if probe.fits:
            assert probe.peak_reserved_bytes is not None
            self._fitting[probe.batch_size] = probe
            self.model.observe(probe.batch_size, probe.peak_reserved_bytes)
        else:
            self._fails = min(self._fails, probe.batch_size)
            self._failed_climbs += 1

    def chosen(self) -> Probe | None:
        """The smallest fitting size within tolerance of the best rate seen, if it is clearly smaller than the best."""
        smallest, best = self._smallest_good(), self.best()
        if smallest is None or best is None:
            return None
        return smallest if smallest.batch_size <= CLEARLY_SMALLER * best.batch_size else best

    def best(self) -> Probe | None:
        """The fitting size with the best rate seen."""
        return max(self._fitting.values(), key=_rate, default=None)

    def _smallest_good(self) -> Probe | None:
        goal = (1 - self.tolerance) * self._best_rate()
        return next((probe for probe in self._by_size() if _rate(probe) >= goal), None)

    @property
    def largest(self) -> int:
        """The largest size seen to fit."""
        return max(self._fitting, default=0)

    def _first(self) -> int | None:
        """The smallest size; with a forecast one that should take a small part of the limit, unless that has failed."""
        if self._fails <= self.grid.first or self.model.points:
            return None
        if self.model.prior is None or self._failed_climbs:
            return self.grid.first
        start = self.model.largest_within(round(FORECAST_START * self.limit_bytes)) or 0
        return max(self.grid.floor(start), self.grid.first)

    def _leap(self) -> int | None:
        """With a forecast, once: from the first size, which corrects it, to one that should be near the limit."""
        if not self._forecast_counts:
            return None
        self._forecast_counts = False
        if self._failed_climbs or not 1 / MOST_OFF <= self.model.prior_error() <= MOST_OFF:
            return None
        size = self.grid.floor(self._reach(FORECAST_REACH))
        if not self.grid.up(self.largest) <= size < self._fails:
            return None
        self._looked = True
        return size

    def _learn(self) -> int | None:
        """Up to three sizes: the smallest, and twice one half of what a line through the points so far allows.

        The first line starts at what is resident. Bytes that bend upwards too sharply for half a line cost one
        out-of-memory error, after which the climb goes on below it.
        """
        if len(self._fitting) >= 3 or self._failed_climbs or self._looked:
            return None
        if len(self._fitting) == 1:
            straight: float = self.model.proportionally_within(self.limit_bytes)
            leap = SECOND_LEAP
        else:
            straight = self.model.largest_within(self.limit_bytes) or self.grid.last  # None: flat so far
            leap = LONGEST_LEAP
        reach = min(max(self.model.surely_within(self.limit_bytes), straight / 2), self.largest * leap)
        if len(self._fitting) == 2 and reach < 1.5 * self.largest:
            return None  # the limit is near: climb
        size = self.grid.between(reach, self.largest, self._fails)
        return size if size < self._fails else None

    def _climb(self) -> int | None:
        """A size near the limit: while it promises more, and once for its own sake if that takes little time."""
        if self._failed_climbs >= FAILED_CLIMBS or (self._at_the_brim and not self._failed_climbs):
            return None
        foreseen = self._forecast_reach()
        reach = self._reach(1 - self.headroom) if foreseen is None else foreseen
        if self._failed_climbs:  # step back: a little from a failure near the limit, half-way from a surprising one
            surprising = len(self._fitting) < 3 or self._failed_climbs > 1
            back = 0.5 if surprising else 0.08
            reach = min(reach, self._fails - back * (self._fails - self.largest))
        size = self.grid.floor(reach)
        worth = 1.1 if self.model.prior is None else 1.05  # a forecast has led near the limit, but not quite
        if size >= self._fails or size < max(self.largest * worth, self.grid.up(self.largest)):
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
        in_use = (seen.peak_allocated_bytes or 0) / max(forecast.allocated_at(seen.batch_size), 1)
        reserved = (seen.peak_reserved_bytes or 0) / max(forecast.reserved_at(seen.batch_size), 1)
        if abs(in_use - 1) > RIGHT or abs(reserved - 1) > NEARLY_RIGHT:
            return None
        limits = [round((1 - headroom) * self.limit_bytes) for headroom in (self.headroom, MORE_HEADROOM)]
        low, high = self.largest, min(math.ceil(self._bearable()), self.grid.last) + 1
        while high - low > max(low // FORECAST_STEPS, 1):
            middle = (low + high) // 2
            runs = all(forecast.runs_within(middle, limit) for limit in limits)
            low, high = (middle, high) if runs else (low, middle)
        return low

    def _expected_seconds(self, size: int) -> float:
        """The step time at a larger size, if step times go on in a line through the last two."""
        probes = self._by_size()
        seconds = probes[-1].step_seconds or 0.0
        if len(probes) > 1:
            fixed, per_item = _seconds_line(probes[-2], probes[-1])
            seconds = max(seconds, fixed + per_item * size)
        return max(seconds, 1e-9)

    def _best_rate(self) -> float:
        best = self.best()
        return 0.0 if best is None else _rate(best)

    def _reach(self, share: float) -> float:
        """The largest size that the byte model, within a share of the limit, and a step of bearable length allow."""
        within = self.model.largest_within(round(self.limit_bytes * share))
        by_bytes = self.grid.last if within is None else within
        return min(by_bytes, self._bearable(), self.grid.last)

    def _bearable(self) -> float:
        """The largest size with a step of bearable length, and not too far from what was seen."""
        first, last = self._by_size()[0].step_seconds or 0.0, self._by_size()[-1].step_seconds or 0.0
        by_time = max(LONGEST_STEP_SECONDS, 4 * first) / last if last else LONGEST_LEAP
        return self.largest * min(by_time, LONGEST_LEAP)

    def _knee(self) -> int | None:
        """A size between the smallest good one and the one below it, where step times say the knee is."""
        good, best = self._smallest_good(), self.best()
        if good is None or best is None or self._knee_probes >= KNEE_PROBES:
            return None
        below = [probe for probe in self._by_size() if probe.batch_size < good.batch_size]
        if not below:
            return self._below_the_smallest(good)
        size = _where_rate_reaches((1 - self.tolerance / 2) * _rate(best), below[-1], good)
        size = self.grid.floor(size + self.grid.multiple_of - 1)
        if not below[-1].batch_size * 1.1 < size <= min(CLEARLY_SMALLER * best.batch_size, 0.85 * good.batch_size):
            return None
        self._knee_probes += 1
        return size

    def _below_the_smallest(self, good: Probe) -> int | None:
        """With a forecast the smallest size tried may be fast already: look once at an eighth of it."""
        if self.model.prior is None or self._looked_below or good.batch_size <= self.grid.first:
            return None
        self._looked_below = True
        return max(self.grid.floor(good.batch_size / 8), self.grid.first)

    def _saturated(self) -> bool:
        """Whether doubling the size, or more, brought less than half the tolerance.

        Never said of the first two sizes: those run for milliseconds, and a busy host hides what they gain.
        """
        probes = self._by_size()
        if len(probes) < 3:
            return False
        smaller, larger = probes[-2], probes[-1]
        grown = larger.batch_size >= 2 * smaller.batch_size
        return grown and _rate(larger) <= _rate(smaller) * (1 + self.tolerance / 2)

    def _by_size(self) -> list[Probe]:
        return [self._fitting[size] for size in sorted(self._fitting)]


def _rate(probe: Probe) -> float:
    return probe.samples_per_second or 0.0


def _seconds_line(low: Probe, high: Probe) -> tuple[float, float]:
    """The line of step time over size through two probes: seconds of a step that carries nothing, and per item."""
    assert low.step_seconds is not None
    assert high.step_seconds is not None
    per_item = (high.step_seconds - low.step_seconds) / (high.batch_size - low.batch_size)
    return low.step_seconds - per_item * low.batch_size, per_item


def _where_rate_reaches(rate: float, low: Probe, high: Probe) -> float:
    """The size between two probes where the rate is reached, if step time is affine between them."""
    fixed, per_item = _seconds_line(low, high)
    if 1 - rate * per_item <= 0:
        return high.batch_size
    return min(max(rate * fixed / (1 - rate * per_item), low.batch_size), high.batch_size)
