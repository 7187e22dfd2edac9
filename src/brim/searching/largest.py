"""The search for the largest size that fits: asks for a size, is told the probe, in a handful of rounds.

For affine and quadratic bytes it takes five probes and one out-of-memory error, the one that proves that
the next size does not fit: size 1; a size that is safe even if everything grows with n²; one that is safe
even if all growth between those two is quadratic; the root of the parabola through the three; and one
more. Stairs and slopes that change send it to interpolation, safeguarded by bisection.

Pure: no device, no clock.
"""

from __future__ import annotations

import math

from brim.forecasting.byte_model import ByteModel
from brim.records import Probe
from brim.searching.size_grid import SizeGrid

__all__ = ["LargestSearch"]

# Bisection alone settles any curve up to a ceiling of 4,096 in 13 probes; from the moment a failing size is
# known, proposals are kept where bisection could still finish within this many probes in all.
PROBE_ALLOWANCE = 14
LONGEST_BLIND_LEAP = 2048  # with two points known: half of that allowance's range


class LargestSearch:
    """Finds the largest fitting size.

        search = LargestSearch(ByteModel(), limit_bytes=limit, grid=SizeGrid(last=4096))
        while (size := search.next_size()) is not None:
            search.tell(probe(size))
        search.largest

    `resolution` ends the search once the bracket is that fraction of the size wide: 0 is exact.
    """

    def __init__(self, model: ByteModel, *, limit_bytes: int, grid: SizeGrid, resolution: float = 0.0) -> None:
        self.model = model
        self.limit_bytes = limit_bytes
        self.grid = grid
        self.resolution = resolution
        self.largest = 0  # the largest size seen to fit
        self._fails = grid.last + 1  # the smallest size known, or out of bounds, not to fit
        self._failed = 0
        self._probes = 0
        self._slow_rounds = 0  # rounds in a row that cut the bracket by less than half
        self._gallop = 0  # how far past the model's answer to look
        self._stairs_trusted = True

    def next_size(self) -> int | None:
        """The size to probe next, or None when the largest is settled."""
        low, high = self.largest, self._fails
        if self.grid.up(low) >= high or (self._failed and high - low <= self.resolution * low):
            return None
        if not self.model.points:
            return self.grid.first if low == 0 and not self._failed else None
        return self.grid.between(self._affordable(self._wish()), low, high)

    def tell(self, probe: Probe) -> None:
        """Take in the outcome of the size asked for."""
        width, bracketed = self._fails - self.largest, self._failed > 0
        if probe.fits:
            assert probe.peak_reserved_bytes is not None
            if probe.batch_size > self._stairs_target():
                self._stairs_trusted = False
            if probe.batch_size <= (self.model.largest_within(self.limit_bytes) or 0):
                self._gallop = 0
            self.largest = max(self.largest, probe.batch_size)
            self.model.observe(probe.batch_size, probe.peak_reserved_bytes)
        else:
            self._failed += 1
            self._fails = min(self._fails, probe.batch_size)
        self._probes += 1
        halved = (self._fails - self.largest) * 2 <= width
        self._slow_rounds = 0 if halved or not bracketed else self._slow_rounds + 1

    def _wish(self) -> float:
        """Where the byte model would look next."""
        low, high = self.largest, self._fails
        if self.model.shape == "flat":
            near_the_end = not self._failed and high <= 4 * low
            return high - 1 if near_the_end else math.sqrt(max(low, 1) * high)
        if len(self.model.points) <= 2 and not self._failed:
            return min(self.model.surely_within(self.limit_bytes), low + LONGEST_BLIND_LEAP)
        stairs_target = self._stairs_target()
        if low <= stairs_target < math.inf:
            return stairs_target
        guess = self._cautious_guess()
        if guess is None:
            return (low + high) / 2
        if guess <= low:  # the model sees no more room: look one size past it, then further
            self._gallop = self._gallop * 4 or 1
            if self._gallop == 1:
                return low + 1
            return (low + high) / 2 if self._failed else min(low + self._gallop, (low + high) / 2)
        stale = guess >= high - 0.02 * (high - low) and high - low > 4
        if self._failed and (stale or self._slow_rounds >= 2):
            return self._below_failure()
        return guess

    def _cautious_guess(self) -> int | None:
        """The model's answer; a long leap from few points must also hold for the chord through all of them."""
        guess, points = self.model.largest_within(self.limit_bytes), self.model.points
        if guess is None or self._failed or len(points) > 4 or guess <= 2 * self.largest:
            return guess
        (n1, y1), (n2, y2) = points[0], points[-1]
        chord = math.floor(n1 + (self.limit_bytes - y1) * (n2 - n1) / (y2 - y1) + 1e-9)
        return max(min(guess, chord), self.largest + 1)

    def _below_failure(self) -> float:
        low, high = self.largest, self._fails
        if not self.model.straight and self._failed == 1:
            return high - max(1, (high - low) // 8)  # on uneven bytes the guess was off by a step or two, not by half
        return (low + high) / 2

    def _affordable(self, size: float) -> float:
        """The wish, moved where bisection can still finish in time whatever the outcome."""
        low, high, left = self.largest, self._fails, PROBE_ALLOWANCE - self._probes
        if not self._failed or left < 1 or high - low > 1 << left:
            return size
        half = 1 << (left - 1)
        return min(max(size, high - half), low + half)

    def _stairs_target(self) -> float:
        """Where the treads end if their length is the middle of what is still possible; infinite without stairs."""
        stairs = self.model.staircase(self.limit_bytes, fits_below=self._fails) if self._stairs_trusted else None
        if stairs is None:
            return math.inf
        return stairs.allowed_steps * ((stairs.smallest_tread + stairs.largest_tread + 1) // 2)
