"""The governor: how large the next batch may be, learnt from the batches of the run itself.

It starts small, grows while padded cost per second rises (fourfold while a batch's time hardly depends on its size,
else twofold), and settles at the knee. An out-of-memory error halves the
cap and marks the size that failed; the cap grows back towards the mark, never straight to it, and the mark itself
moves up only after a long quiet stretch. Pure: it is told what happened, and asked for a cap.
"""

from __future__ import annotations

import math

from brim.forecast.byte_model import ByteModel

__all__ = ["Governor"]

WORTHWHILE = 1.08  # a doubling that brings less than this is not worth its memory
LEAP = 4  # how far to grow while time hardly rises with size
LINEAR = 0.75  # of the growth in size: a rate that rises by more than this says that time hardly rises
CLEARLY = 1.3  # one that brings this much is believed at once; otherwise a second batch is asked
QUIET_BATCHES = 8  # batches without trouble before the cap may grow again after an OOM
FORGIVING_BATCHES = 64  # batches without trouble before a failed size may be approached again
USABLE = 0.97  # of the memory limit, when the byte model says how far a doubling may go


class Governor:
    """Chooses the cap, in padded cost, batch by batch.

    `first` is where it starts and `ceiling` where it ends. `grows=False` keeps the size that the user gave: only an
    out-of-memory error lowers it, and quiet batches bring it back.
    """

    def __init__(
        self, *, first: int, ceiling: int | None = None, grows: bool = True, limit_bytes: int | None = None
    ) -> None:
        self.ceiling: float = math.inf if ceiling is None else max(ceiling, 1)
        self.cap = int(min(max(first, 1), self.ceiling))
        self.settled = not grows
        self.model = ByteModel(noise=0.01)
        self._limit_bytes = limit_bytes
        self._wanted: float = self.cap  # where the cap goes back to after trouble
        self._failed: float = math.inf  # the smallest padded cost known to fail
        self._quiet = 0  # batches since the last trouble or growth
        self._rates: list[float] = []  # at the current cap
        self._best_cap, self._best_rate = self.cap, 0.0
        self._small = 2  # batches to be made small before the first leap
        self._before_trouble: tuple[int, float, float, bool] | None = None
        self._blamed = False  # an item was, and nothing has succeeded since

    def succeeded(self, cost: int, seconds: float, peak_bytes: int | None = None) -> None:
        """A batch of this padded cost ran. One far below the cap (the last, the cheapest) says nothing about it."""
        self._quiet += 1
        self._before_trouble, self._blamed = None, False
        if peak_bytes is not None:
            self.model.observe(cost, peak_bytes)
        if self._recover() or self.settled or cost <= 0.5 * self.cap:
            return
        self._rates.append(cost / max(seconds, 1e-9))
        rate = max(self._rates)
        if rate >= CLEARLY * self._best_rate or len(self._rates) >= 2:
            self._judge(rate)

    def ran_out(self, cost: int) -> None:
        """A batch of this padded cost ran out of memory: half of it from here on, and never straight back."""
        if self._before_trouble is None:
            self._before_trouble = (self.cap, self._wanted, self._failed, self.settled)
        self._failed = min(self._failed, cost)
        self.cap = max(min(self.cap, cost) // 2, 1)
        self._wanted = max(min(self._wanted, cost - 1), 1)
        self._quiet = 0
        self.settled = True

    def blame_item(self) -> None:
        """One item does not fit even alone, under a cap that counts items: that says nothing about how many others fit.

        What was learnt from the batches that it was in is forgotten, unless the item before it ended in the same way.
        """
        if self._before_trouble is not None and not self._blamed:
            self.cap, self._wanted, self._failed, self.settled = self._before_trouble
        self._before_trouble, self._blamed = None, True

    def _judge(self, rate: float) -> None:
        """Go on doubling while it pays; else go back to the best cap and stay."""
        self._rates = []
        self._small -= 1
        if rate >= WORTHWHILE * self._best_rate:
            linear = rate >= LINEAR * self._best_rate * self.cap / self._best_cap > 0
            factor = LEAP if linear and self._small <= 0 else 2
            self._best_cap, self._best_rate = self.cap, rate
            larger = math.floor(min(self.cap * factor, self.ceiling, self._failed - 1, self._fitting()))
            if larger > self.cap:
                self.cap = larger
                self._wanted = larger
                return
        self.settled = True
        self.cap = self._best_cap
        self._wanted = self.cap

    def _fitting(self) -> float:
        """The largest padded cost that the byte model expects to fit."""
        within = None if self._limit_bytes is None else self.model.largest_within(round(USABLE * self._limit_bytes))
        return math.inf if within is None else within

    def _recover(self) -> bool:
        """After trouble: a step towards the wanted cap, always below what is known to fail."""
        if self._failed == math.inf:
            return False
        if self._quiet >= FORGIVING_BATCHES:
            self._failed *= 1.25
            self._wanted = min(max(self._wanted, 0.8 * self._failed), self.ceiling)
        if self._quiet < QUIET_BATCHES or self.cap >= self._wanted:
            return False
        # Half-way to the failure at most: the failing size is approached, not repeated.
        grown = math.floor(min(self.cap * 2, self._wanted, (self.cap + self._failed) / 2, self._failed - 1))
        if grown <= self.cap:
            return False
        self.cap, self._quiet = grown, 0
        return True
