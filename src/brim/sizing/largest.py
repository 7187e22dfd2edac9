"""Probing for the largest size that fits, in a handful of rounds.

For affine and quadratic bytes it takes five probes and one out-of-memory error, the one that proves that
the next size does not fit: size 1; a size that is safe even if everything grows with n²; one that is safe
even if all growth between those two is quadratic; the root of the parabola through the three; and one
more. Stairs and slopes that change send it to interpolation, safeguarded by bisection.
"""

from __future__ import annotations

import math

from brim.sizing.constants import LONGEST_BLIND_LEAP, PROBE_ALLOWANCE
from brim.sizing.sizer import Evidence, ProbingSizer, SizeGrid, Trial

__all__ = ["LargestSizer"]


class LargestSizer(ProbingSizer):
    """Finds the largest fitting size.

        sizer = LargestSizer(Evidence(ByteModel(), limit_bytes=limit), grid=SizeGrid(last=4096))
        while not sizer.settled:
            sizer.record(probe(sizer.next_size()))
        sizer.largest

    `resolution` ends the search once the bracket is that fraction of the size wide: 0 is exact.
    """

    def __init__(self, evidence: Evidence, *, grid: SizeGrid, resolution: float = 0.0) -> None:
        self.resolution = resolution
        self._largest_trial: Trial | None = None
        self._failed = 0
        self._probes = 0
        self._slow_rounds = 0  # rounds in a row that cut the bracket by less than half
        self._gallop = 0  # how far past the model's answer to look
        self._stairs_trusted = True
        super().__init__(evidence, grid)

    def chosen(self) -> Trial | None:
        """The largest that fits."""
        return self._largest_trial

    def _propose(self) -> int | None:
        low, high = self.largest, self._fails_from
        if self.grid.up(low) >= high or (self._failed and high - low <= self.resolution * low):
            return None
        if not self._bytes.points:
            return self.grid.first if low == 0 and not self._failed else None
        return self.grid.between(self._affordable(self._wish()), low, high)

    def _take(self, trial: Trial) -> None:
        width, bracketed = self._fails_from - self.largest, self._failed > 0
        if trial.fits:
            if trial.size > self._stairs_target():
                self._stairs_trusted = False
            if trial.size <= (self._bytes.largest_within(self._limit_bytes) or 0):
                self._gallop = 0
            if trial.size > self.largest:
                self.largest, self._largest_trial = trial.size, trial
        else:
            self._failed += 1
        self._observe(trial)
        self._probes += 1
        halved = (self._fails_from - self.largest) * 2 <= width
        self._slow_rounds = 0 if halved or not bracketed else self._slow_rounds + 1

    def _wish(self) -> float:
        """Where the byte model would look next."""
        low, high = self.largest, self._fails_from
        if self._bytes.shape == "flat":
            near_the_end = not self._failed and high <= 4 * low
            return high - 1 if near_the_end else math.sqrt(max(low, 1) * high)
        if len(self._bytes.points) <= 2 and not self._failed:
            return min(self._bytes.surely_within(self._limit_bytes), low + LONGEST_BLIND_LEAP)
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
        guess, points = self._bytes.largest_within(self._limit_bytes), self._bytes.points
        if guess is None or self._failed or len(points) > 4 or guess <= 2 * self.largest:
            return guess
        (n1, y1), (n2, y2) = points[0], points[-1]
        chord = math.floor(n1 + (self._limit_bytes - y1) * (n2 - n1) / (y2 - y1) + 1e-9)
        return max(min(guess, chord), self.largest + 1)

    def _below_failure(self) -> float:
        low, high = self.largest, self._fails_from
        if not self._bytes.straight and self._failed == 1:
            return high - max(1, (high - low) // 8)  # on uneven bytes the guess was off by a step or two, not by half
        return (low + high) / 2

    def _affordable(self, size: float) -> float:
        """The wish, moved where bisection can still finish in time whatever the outcome."""
        low, high, left = self.largest, self._fails_from, PROBE_ALLOWANCE - self._probes
        if not self._failed or left < 1 or high - low > 1 << left:
            return size
        half = 1 << (left - 1)
        return min(max(size, high - half), low + half)

    def _stairs_target(self) -> float:
        """Where the treads end if their length is the middle of what is still possible; infinite without stairs."""
        stairs = self._bytes.staircase(self._limit_bytes, fits_below=self._fails_from) if self._stairs_trusted else None
        if stairs is None:
            return math.inf
        return stairs.allowed_steps * ((stairs.smallest_tread + stairs.largest_tread + 1) // 2)
