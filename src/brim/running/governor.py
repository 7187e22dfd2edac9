"""The governor: how large the next batch may be, learnt from the batches of the run itself.

It climbs: two small batches, then fourfold while a batch's time hardly depends on its size, else twofold, one batch at
a time. When a step up no longer brings much it compares (`comparison.py`): batches overlap as they will for the rest of
the run, and twice the size is tried against this one; it is kept if it brings a few per cent. Where larger batches cost
nothing but memory (`looks_far`) it then compares once with the largest size that leaves room: doublings that bring
little each may bring enough together. Then it is settled, until the items have become much cheaper: the best cap for
long items is not that for short ones. Towards a size that the user gave it rises, as far as memory goes, however fast
that is. An out-of-memory error halves the cap and marks the size that failed; the cap grows back towards the mark,
never straight to it, and the mark itself moves up only after a long quiet stretch. That caution is for failures of its
own: where other processes held the memory at the failure and have given it back, the size from before returns at once.
Pure: it is told what happened, and asked for a cap.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from brim.forecasting.byte_model import ByteModel
from brim.running.comparison import WORTHWHILE, Comparison, Drifting, Steady

__all__ = ["Governor"]

LEAP = 4  # how far to grow while time hardly rises with size
LINEAR = 0.75  # of the growth in size: a rate that rises by more than this says that time hardly rises
CLEARLY = 1.3  # a step up that brings this much is believed at once; with less the climb ends
CHEAPER = 0.6  # of the dearest item when it settled: from here on the comparison is made again
QUIET_BATCHES = 8  # batches without trouble before the cap may grow again after an OOM
LESS = 0.9  # of a size that ran short of memory
FORGIVING_BATCHES = 64  # batches without trouble before a failed size may be approached again
USABLE = 0.97  # of the memory limit, when the byte model says how far a doubling may go
ROOMY = 0.85  # of the memory limit, for a look far beyond
NEARLY = 0.9  # of the largest batch since the cache was given back: what a smaller one takes is not its own
MOST_CALM_READINGS = 64  # without others in the way, before a size returns that they have taken back again and again
FAR = 1.2  # times the doubling just tried: what is nearer is not looked at again

Phase = Literal["climbing", "rising", "comparing", "settled"]


class Governor:
    """Chooses the cap, in padded cost, batch by batch.

    `first` is where it starts and `ceiling` where it ends. `grows=False` keeps the size that the user gave: only an
    out-of-memory error lowers it, and quiet batches bring it back; where `first` is a smaller guess, it first rises to
    it. `cap_known` starts at a size found before, and `cap_likely` at one found for something similar: it is compared.
    With `steady` a rate is the size's own, whenever it was seen. With `shares_of` so many are cut into equal parts in
    the end, so that sizes in between are not tried: of 96 it is 48 that is compared with 32, not 64, which leaves a
    rest.
    """

    def __init__(
        self,
        *,
        first: int,
        ceiling: int | None = None,
        grows: bool = True,
        cap_known: bool = False,
        cap_likely: bool = False,
        looks_far: bool = False,
        steady: bool = False,
        shares_of: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.ceiling: float = math.inf if ceiling is None else max(ceiling, 1)
        self.cap = int(min(max(first, 1), self.ceiling))
        self.phase: Phase = "climbing"
        if not grows:
            self.phase = "rising" if self.cap < self.ceiling < math.inf else "settled"
        elif cap_known or cap_likely:
            self.phase = "settled" if cap_known else "comparing"
        self.shares_of = shares_of
        self.model = ByteModel(noise=0.01)
        self._grows = grows
        self._limit_bytes = limit_bytes
        # Where the cap goes back to after trouble.
        self._wanted: float = self.ceiling if self.phase == "rising" else self.cap
        self._failed: float = math.inf  # the smallest padded cost known to fail
        self._quiet = 0  # batches since the last trouble or growth
        self._best_cap, self._best_rate = self.cap, 0.0  # while climbing
        self._comparison: Comparison = Steady() if steady else Drifting()
        self._larger = 0  # what this size was last compared with
        self._looks_far = looks_far
        self._fallback = 0  # the cap before it grew back, until a batch has run at the new one
        self._cached = 0  # the largest padded cost since the allocator gave back its cache
        self._small = 2  # batches to be made small before the first leap
        self._dearest: float = math.inf if not cap_known else 0  # item when it settled; 0: not known yet
        self._before_trouble: tuple[int, float, float, Phase] | None = None
        self._blamed = False  # an item was, and nothing has succeeded since
        # Cap, ceiling, wanted cap, failed cost and phase before others took the memory, until they have given it back.
        self._undisturbed: tuple[int, float, float, float, Phase] | None = None
        self._calm_readings, self._returns = 0, 0  # readings without others since then; how often a size has returned

    @property
    def overlaps(self) -> bool:
        """Whether the next batch may start before the last one is read: while it grows, a batch is looked at alone."""
        return self.phase not in ("climbing", "rising")

    @property
    def kept(self) -> int:
        """The cap that has proved itself so far; `cap` may be one on trial."""
        return self._best_cap if self.phase == "comparing" else self.cap

    @property
    def settled(self) -> bool:
        """Whether the size is found."""
        return self.phase == "settled"

    def succeeded(self, cost: int, seconds: float, peak_bytes: int | None = None, dearest: int | None = None) -> None:
        """A batch of this padded cost ran, the dearest of its items costing `dearest`.

        One far below the cap (the last, one started before the cap grew) says nothing about it.
        """
        self._quiet += 1
        self._before_trouble, self._blamed = None, False
        if cost > self._fallback:
            self._fallback = 0
        if peak_bytes is not None:
            self.took(cost, peak_bytes)
        if self._recover():
            return
        if self.phase == "settled":
            self._look_again(dearest)
            return
        if not 0.5 * self.cap < cost <= self.cap:
            return
        rate = cost / max(seconds, 1e-9)
        self._comparison.took(seconds)
        if self.phase == "climbing":
            self._climb(rate)
        elif self.phase == "rising":
            self._rise()
        else:
            self._compare(rate)
        if self.settled and dearest is not None:
            self._dearest = dearest

    def fitting(self, share: float = USABLE) -> float:
        """The largest padded cost that the byte model expects to fit into a share of the memory limit.

        After a first batch that is a line from what is resident, where that is known.
        """
        if self._limit_bytes is None:
            return math.inf
        room = round(share * self._limit_bytes)
        within: float | None = self.model.largest_within(room)
        if within is None and self.model.base_bytes > 0 and len(self.model.points) == 1:
            within = self.model.proportionally_within(room)
        return math.inf if within is None else within

    def took(self, cost: int, peak_bytes: int) -> None:
        """What a batch of this padded cost took, for the byte model.

        After a larger one the allocator holds what that one took, which says nothing of this one.
        """
        if cost >= NEARLY * self._cached:
            self.model.observe(cost, peak_bytes)
        self._cached = max(self._cached, cost)

    def cache_given_back(self) -> None:
        """From here on a batch takes no more than its own."""
        self._cached = 0

    @property
    def disturbed(self) -> bool:
        """Whether the size is smaller because other processes held the memory."""
        return self._undisturbed is not None

    def others_hold(self, left_bytes: int | None) -> bool:
        """Whether other processes leave less of the device than sizes are chosen for; None: that is not known."""
        return left_bytes is not None and self._limit_bytes is not None and left_bytes < USABLE * self._limit_bytes

    def note_others(self, left_bytes: int | None) -> None:
        """Before a failure is reported: what other processes leave. If they are to blame, its size may return."""
        if self._undisturbed is None and self.others_hold(left_bytes):
            self._undisturbed = (self.cap, self.ceiling, self._wanted, self._failed, self.phase)
            self._calm_readings = 0

    def return_after_others(self, left_bytes: int | None) -> bool:
        """Between two batches: what other processes leave. Whether the size from before the disturbance is back.

        After the first time it takes more than one reading, doubled each time: others may come and go for ever.
        """
        self._calm_readings = 0 if self.others_hold(left_bytes) else self._calm_readings + 1
        if self._undisturbed is None or self._calm_readings < min(2**self._returns, MOST_CALM_READINGS):
            return False
        self._fallback = self.cap
        self.cap, ceiling, self._wanted, self._failed, self.phase = self._undisturbed
        self.ceiling = max(self.ceiling, ceiling)  # it may have been raised in the meantime
        self._undisturbed, self._before_trouble = None, None
        self._quiet, self._calm_readings = 0, 0
        self._returns += 1
        return True

    def ran_out(self, cost: int) -> None:
        """A batch of this padded cost ran out of memory: half of it from here on, and never straight back.

        If it was on trial, what it was compared with or grew back from is known to run, and is not halved as well.
        """
        if self._before_trouble is None:
            self._before_trouble = (self.cap, self._wanted, self._failed, self.phase)
        known = min(self._best_cap, self.cap) if self.phase == "comparing" else self._fallback
        proven, self._fallback = known if known < cost else 0, 0
        self.cache_given_back()
        self._failed = min(self._failed, cost)
        self._quiet = 0
        self.phase = "settled"
        self.cap = max(min(self.cap, cost) // 2, proven, 1)
        self._wanted = max(min(self._wanted, cost - 1), 1)

    def keep_within(self, cost: int) -> None:
        """The byte model says by now that no more than this fits: so much is tried instead, if it is worth a look."""
        within = math.floor(self._share(max(cost, 1)))
        if self.settled or within >= self.cap:
            return
        if self.phase == "comparing" and within <= self._best_cap:
            self._settle()
        else:
            self.cap = within
            self._comparison.begin(self._comparison.before)

    def ran_short(self, cost: int) -> None:
        """A batch of this padded cost ran, but the allocator had to give back its cache for it: a little less now.

        For good: the size would run short again, and what little it brings is not worth a look.
        """
        self._quiet = 0
        self.phase = "settled"
        self.cap = max(min(self.cap, math.floor(LESS * cost)), 1)
        self.ceiling = self._wanted = self.cap

    def blame_item(self) -> None:
        """One item does not fit even alone, under a cap that counts items: that says nothing about how many others fit.

        What was learnt from the batches that it was in is forgotten, unless the item before it ended in the same way.
        """
        if self._before_trouble is not None and not self._blamed:
            self.cap, self._wanted, self._failed, self.phase = self._before_trouble
        self._before_trouble, self._blamed = None, True

    def to_json(self) -> dict[str, Any]:
        """All that it knows, as a checkpoint keeps it."""
        own = {name: value for name, value in vars(self).items() if name not in ("model", "_comparison")}
        held = {name: _held(value) for name, value in own.items()}
        return {**held, "comparison": dict(vars(self._comparison)), "points": self.model.points}

    def restore(self, data: dict[str, Any]) -> None:
        """Go on where `to_json` was called."""
        for name, value in data.items():
            if name in vars(self):
                setattr(self, name, _unheld(value))
        vars(self._comparison).update(data.get("comparison", {}))
        for size, peak in data["points"]:
            self.model.observe(size, peak)

    def _climb(self, rate: float) -> None:
        """On to a larger size while that clearly pays; then compare from here."""
        self._small -= 1
        if rate >= CLEARLY * self._best_rate:
            linear = rate >= LINEAR * self._best_rate * self.cap / self._best_cap > 0
            self._best_cap, self._best_rate = self.cap, rate
            if self._grow(LEAP if linear and self._small <= 0 else 2):
                return
        elif self._comparison.steady:
            self.phase = "comparing"
            self._comparison.begin(self._best_rate)
            self._compare(rate)
            return
        elif rate < WORTHWHILE * self._best_rate:
            self.cap = self._best_cap
        self._begin_comparing()

    def _rise(self) -> None:
        """To the ceiling at once, or as far as the byte model says; without one, twofold."""
        fitting: float = 2 * self.cap
        if self.model.points and self._limit_bytes is not None:
            usable = round(USABLE * self._limit_bytes)
            fitting = self.model.largest_within(usable) or self.model.proportionally_within(usable)
        larger = math.floor(min(self.ceiling, self._failed - 1, fitting))
        if larger <= self.cap or larger == self.ceiling:
            self.phase = "settled"
        self.cap = max(self.cap, larger)

    def _begin_comparing(self) -> None:
        self.phase = "comparing"
        self._best_cap, self._larger = self.cap, 0
        self._comparison.begin()

    def _compare(self, rate: float) -> None:
        """On from this size to twice the size while that is worth it; else settle here, unless far away is better."""
        step = self._comparison.saw(rate)
        if step == "this":
            self._larger, self.cap = self.cap, self._best_cap
        elif step == "larger" and self.cap == self._best_cap:
            self._try_larger()
        elif step == "keep":
            self._best_cap = self.cap = max(self.cap, self._larger)
            self._larger = 0
            if self._comparison.before is not None:
                self._try_larger()
        elif step == "refuse" and not self._look_far():
            self._settle()

    def _try_larger(self) -> None:
        """What was tried before, or else twice the size; there may be no such thing."""
        if self._larger > self.cap:
            self.cap = self._larger
        elif not self._grow(2):
            self._settle()

    def _look_far(self) -> bool:
        """Once, compare with the largest size that leaves room in memory; whether there is one worth a look."""
        far = self._share(min(self.ceiling, self._failed - 1, self.fitting(ROOMY)))
        if not self._looks_far or not FAR * self._larger <= far < math.inf:
            return False
        self._looks_far = False
        self.cap = math.floor(far)
        self._comparison.begin(self._comparison.usual)
        return True

    def _settle(self) -> None:
        self.phase = "settled"
        self.cap = self._best_cap
        self._wanted = self.cap

    def _grow(self, factor: int) -> bool:
        """Raise the cap as far as ceiling, failures and memory allow; whether that is any further."""
        larger = math.floor(self._share(min(self.cap * factor, self.ceiling, self._failed - 1, self.fitting())))
        if larger <= self.cap:
            return False
        self.cap = larger
        self._wanted = larger
        return True

    def _share(self, size: float) -> float:
        """The largest equal share that is no larger."""
        if self.shares_of is None or not 1 <= size < math.inf:
            return size
        return math.ceil(self.shares_of / math.ceil(self.shares_of / math.floor(size)))

    def _look_again(self, dearest: int | None) -> None:
        """Once the items are much cheaper than when it settled, compare anew."""
        if dearest is None or not self._grows or self._failed != math.inf:
            return
        if self._dearest == 0:
            self._dearest = dearest
        elif dearest < CHEAPER * self._dearest:
            self._dearest = dearest
            self._begin_comparing()

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
        half_way = (self.cap + self._failed) / 2
        grown = math.floor(min(self.cap * 2, self._wanted, half_way, self._failed - 1, self.fitting()))
        if grown <= self.cap:
            return False
        self._fallback, self.cap, self._quiet = self.cap, grown, 0
        return True


def _held(value: Any) -> Any:
    """A value as JSON can hold it: there is no infinity in it."""
    if isinstance(value, (tuple, list)):
        return [_held(one) for one in value]
    return "inf" if value == math.inf else value


def _unheld(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unheld(one) for one in value)
    return math.inf if value == "inf" else value
