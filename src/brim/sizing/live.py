"""Live work: how large the next batch may be, learnt from the batches of the run itself.

It climbs: two small batches, then fourfold while a batch's time hardly depends on its size, else twofold, one batch at
a time. When a step up no longer brings much it compares (`comparison.py`): batches overlap as they will for the rest of
the run, and twice the size is tried against this one; it is kept if it brings a few per cent. Where larger batches cost
nothing but memory (`compares_far`) it then compares once with the largest size that leaves room: doublings that bring
little each may bring enough together. Then it is settled, until the items have become much cheaper: the best size for
long items is not that for short ones. Towards a size that the user gave it rises, as far as memory goes, however fast
that is. An out-of-memory error halves the size and marks the one that failed; the size grows back towards the mark,
never straight to it, and the mark itself moves up only after a long quiet stretch. That caution is for failures of its
own: where other processes held the memory at the failure and have given it back, the size from before returns at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from brim.sizing.byte_model import ByteModel
from brim.sizing.comparison import Drifting, RateComparison, Steady
from brim.sizing.constants import (
    ALLOCATOR_NOISE,
    FAR_ENOUGH,
    FORGIVEN_GOAL,
    FORGIVEN_GROWTH,
    FORGIVING_BATCHES,
    LEAP_FACTOR,
    LEAP_RATE,
    MIN_SPEEDUP_TO_CLIMB,
    MIN_SPEEDUP_TO_GROW,
    MOST_CALM_READINGS,
    QUIET_BATCHES,
    REOPEN_ITEM_COST,
    ROOMY_LIMIT_FRACTION,
    SHORT_OF_MEMORY,
    USABLE_LIMIT_FRACTION,
)
from brim.sizing.older_checkpoints import live_state
from brim.sizing.sizer import Evidence, Sizer, Trial

__all__ = ["LiveSizer", "Phase"]

LIVE_SIZER_SCHEMA = "brim.live_sizer/1"

Phase = Literal["climbing", "rising", "comparing", "settled"]

# What a checkpoint keeps: the name in the file, and the attribute.
_SAVED = {
    "size": "size",
    "ceiling": "ceiling",
    "phase": "phase",
    "shares_of": "shares_of",
    "grows": "_grows",
    "goal_size": "_goal",
    "quiet_batches": "_quiet_batches",
    "best_size": "_best_size",
    "best_rate": "_best_rate",
    "larger_size": "_larger_size",
    "compares_far": "_compares_far",
    "proven_size": "_proven_size",
    "small_batches_left": "_small_batches_left",
    "settled_item_cost": "_settled_item_cost",
    "before_trouble": "_before_trouble",
    "item_blamed": "_item_blamed",
    "before_others": "_before_others",
    "calm_readings": "_calm_readings",
    "returns": "_returns",
}


class LiveSizer(Sizer):
    """Chooses the largest padded cost, or number of samples, that the next batch may have.

    `first` is where it starts and `ceiling` where it ends. `grows=False` keeps the size that the user gave: only an
    out-of-memory error lowers it, and quiet batches bring it back; where `first` is a smaller guess, it first rises to
    it. `known` starts at a size found before, and `likely` at one found for something similar: it is compared. With
    `steady` a rate is the size's own, whenever it was seen. With `shares_of` so many are cut into equal parts in the
    end, so that sizes in between are not tried: of 96 it is 48 that is compared with 32, not 64, which leaves a rest.
    """

    def __init__(
        self,
        *,
        first: int,
        ceiling: int | None = None,
        grows: bool = True,
        known: bool = False,
        likely: bool = False,
        compares_far: bool = False,
        steady: bool = False,
        shares_of: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.ceiling: float = math.inf if ceiling is None else max(ceiling, 1)
        self.size = int(min(max(first, 1), self.ceiling))
        self.phase: Phase = "climbing"
        if not grows:
            self.phase = "rising" if self.size < self.ceiling < math.inf else "settled"
        elif known or likely:
            self.phase = "settled" if known else "comparing"
        self.shares_of = shares_of
        self.evidence = Evidence(ByteModel(noise=ALLOCATOR_NOISE), limit_bytes=limit_bytes)
        self._grows = grows
        # The size to return to after a failure.
        self._goal: float = self.ceiling if self.phase == "rising" else self.size
        self._quiet_batches = 0  # since the last failure or growth
        self._best_size, self._best_rate = self.size, 0.0  # while climbing
        self._comparison: RateComparison = Steady() if steady else Drifting()
        self._larger_size = 0  # what this size was last compared with
        self._compares_far = compares_far
        self._proven_size = 0  # the size before it grew back, until a batch has run at the new one
        self._small_batches_left = 2  # to be made before the first leap
        self._settled_item_cost: float = math.inf if not known else 0  # of the costliest item; 0: not known yet
        # Size, goal, smallest failing size and phase.
        self._before_trouble: tuple[int, float, float, Phase] | None = None
        self._item_blamed = False  # and nothing has succeeded since
        # Size, ceiling, goal, smallest failing size and phase before others took the memory, until they give it back.
        self._before_others: tuple[int, float, float, float, Phase] | None = None
        self._calm_readings, self._returns = 0, 0  # readings without others since then; how often a size has returned

    @property
    def overlaps(self) -> bool:
        """Whether the next batch may start before the last one is read: while it grows, a batch is timed alone."""
        return self.phase not in ("climbing", "rising")

    @property
    def kept(self) -> int:
        """The size that has proved itself so far; `size` may be one on trial."""
        return self._best_size if self.phase == "comparing" else self.size

    @property
    def settled(self) -> bool:
        """Whether the size is found."""
        return self.phase == "settled"

    @property
    def disturbed(self) -> bool:
        """Whether the size is smaller because other processes held the memory."""
        return self._before_others is not None

    def next_size(self) -> int:
        """What the next batch may have at most."""
        return self.size

    def record(self, trial: Trial) -> None:
        """What happened to a batch: it ran, ran short of memory, or failed for want of it.

        One far below the size (the last, one started before the size grew) says nothing about it.
        """
        if trial.fits:
            self._succeeded(trial)
        elif trial.verdict == "thrashes":
            self._ran_short(trial.size)
        else:
            self._ran_out(trial.size)

    def _succeeded(self, trial: Trial) -> None:
        self._quiet_batches += 1
        self._before_trouble, self._item_blamed = None, False
        if trial.size > self._proven_size:
            self._proven_size = 0
        if trial.peak_bytes is not None:
            self.evidence.observe_bytes(trial.size, trial.peak_bytes)
        if self._recover():
            return
        if self.phase == "settled":
            self._maybe_reopen(trial.costliest_item)
            return
        if not 0.5 * self.size < trial.size <= self.size:
            return
        assert trial.seconds is not None
        self._comparison.timed(trial.seconds)
        if self.phase == "climbing":
            self._climb(trial.rate)
        elif self.phase == "rising":
            self._rise()
        else:
            self._compare(trial.rate)
        if self.settled and trial.costliest_item is not None:
            self._settled_item_cost = trial.costliest_item

    def note_others(self, left_bytes: int | None) -> None:
        """Before a failure is recorded: what other processes leave. If they caused the failure, the size may return."""
        if self._before_others is None and self.evidence.others_hold(left_bytes):
            failing = self.evidence.smallest_failing
            self._before_others = (self.size, self.ceiling, self._goal, failing, self.phase)
            self._calm_readings = 0

    def return_after_others(self, left_bytes: int | None) -> bool:
        """Between two batches: what other processes leave. Whether the size from before the disturbance is back.

        After the first time it takes more than one reading, doubled each time: others may come and go for ever.
        """
        self._calm_readings = 0 if self.evidence.others_hold(left_bytes) else self._calm_readings + 1
        if self._before_others is None or self._calm_readings < min(2**self._returns, MOST_CALM_READINGS):
            return False
        self._proven_size = self.size
        self.size, ceiling, self._goal, self.evidence.smallest_failing, self.phase = self._before_others
        self.ceiling = max(self.ceiling, ceiling)  # it may have been raised in the meantime
        self._before_others, self._before_trouble = None, None
        self._quiet_batches, self._calm_readings = 0, 0
        self._returns += 1
        return True

    def _ran_out(self, size: int) -> None:
        """Half of it from here on, and never straight back.

        If it was on trial, what it was compared with or grew back from is known to run, and is not halved as well.
        """
        evidence = self.evidence
        if self._before_trouble is None:
            self._before_trouble = (self.size, self._goal, evidence.smallest_failing, self.phase)
        known = min(self._best_size, self.size) if self.phase == "comparing" else self._proven_size
        proven, self._proven_size = known if known < size else 0, 0
        evidence.cache_given_back()
        evidence.smallest_failing = min(evidence.smallest_failing, size)
        self._quiet_batches = 0
        self.phase = "settled"
        self.size = max(min(self.size, size) // 2, proven, 1)
        self._goal = max(min(self._goal, size - 1), 1)

    def _ran_short(self, size: int) -> None:
        """It ran, but the allocator had to give back its cache for it: a little less now.

        For good: the size would run short again, and what little it brings is not worth a comparison.
        """
        self._quiet_batches = 0
        self.phase = "settled"
        self.size = max(min(self.size, math.floor(SHORT_OF_MEMORY * size)), 1)
        self.ceiling = self._goal = self.size

    def keep_within(self, size: int) -> None:
        """By the bytes so far no more than this fits: so much is tried instead, if it is worth a comparison."""
        within = math.floor(self._share(max(size, 1)))
        if self.settled or within >= self.size:
            return
        if self.phase == "comparing" and within <= self._best_size:
            self._settle()
        else:
            self.size = within
            self._comparison.begin(self._comparison.before)

    def blame_item(self) -> None:
        """One item does not fit even alone, under a size that counts items: that says nothing about how many others do.

        What was learnt from the batches that it was in is forgotten, unless the item before it ended in the same way.
        """
        if self._before_trouble is not None and not self._item_blamed:
            self.size, self._goal, self.evidence.smallest_failing, self.phase = self._before_trouble
        self._before_trouble, self._item_blamed = None, True

    def to_json(self) -> dict[str, Any]:
        """All that it knows, as a checkpoint keeps it."""
        return {
            "schema": LIVE_SIZER_SCHEMA,
            **{name: _saved(getattr(self, attribute)) for name, attribute in _SAVED.items()},
            "comparison": self._comparison.to_json(),
            "evidence": {
                "points": self.evidence.bytes.points,
                "smallest_failing": _saved(self.evidence.smallest_failing),
                "largest_since_release": self.evidence.largest_since_release,
            },
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue where `to_json` was called, by this version or an earlier one."""
        state = live_state(data)
        for name, attribute in _SAVED.items():
            if name in state:
                setattr(self, attribute, _restored(state[name]))
        self._comparison.restore(state["comparison"])
        evidence = state["evidence"]
        self.evidence.smallest_failing = _restored(evidence["smallest_failing"])
        self.evidence.largest_since_release = evidence["largest_since_release"]
        for size, peak in evidence["points"]:
            self.evidence.bytes.observe(size, peak)

    def _climb(self, rate: float) -> None:
        """On to a larger size while that clearly pays; then compare from here."""
        self._small_batches_left -= 1
        if rate >= MIN_SPEEDUP_TO_CLIMB * self._best_rate:
            linear = rate >= LEAP_RATE * self._best_rate * self.size / self._best_size > 0
            self._best_size, self._best_rate = self.size, rate
            if self._grow(LEAP_FACTOR if linear and self._small_batches_left <= 0 else 2):
                return
        elif self._comparison.steady:
            self.phase = "comparing"
            self._comparison.begin(self._best_rate)
            self._compare(rate)
            return
        elif rate < MIN_SPEEDUP_TO_GROW * self._best_rate:
            self.size = self._best_size
        self._begin_comparing()

    def _rise(self) -> None:
        """To the ceiling at once, or as far as the bytes say; without them, twofold."""
        fitting: float = 2 * self.size
        if self.evidence.bytes.points and self.evidence.limit_bytes is not None:
            usable = round(USABLE_LIMIT_FRACTION * self.evidence.limit_bytes)
            fitting = self.evidence.bytes.largest_within(usable) or self.evidence.bytes.proportionally_within(usable)
        larger = math.floor(min(self.ceiling, self.evidence.smallest_failing - 1, fitting))
        if larger <= self.size or larger == self.ceiling:
            self.phase = "settled"
        self.size = max(self.size, larger)

    def _begin_comparing(self) -> None:
        self.phase = "comparing"
        self._best_size, self._larger_size = self.size, 0
        self._comparison.begin()

    def _compare(self, rate: float) -> None:
        """On from this size to twice the size while that is worth it; else settle here, unless far away is better."""
        step = self._comparison.compare(rate)
        if step == "this":
            self._larger_size, self.size = self.size, self._best_size
        elif step == "larger" and self.size == self._best_size:
            self._try_larger()
        elif step == "keep":
            self._best_size = self.size = max(self.size, self._larger_size)
            self._larger_size = 0
            if self._comparison.before is not None:
                self._try_larger()
        elif step == "refuse" and not self._compare_far():
            self._settle()

    def _try_larger(self) -> None:
        """What was tried before, or else twice the size; there may be no such thing."""
        if self._larger_size > self.size:
            self.size = self._larger_size
        elif not self._grow(2):
            self._settle()

    def _compare_far(self) -> bool:
        """Once, compare with the largest size that leaves room in memory; whether there is one worth it."""
        evidence = self.evidence
        far = self._share(min(self.ceiling, evidence.smallest_failing - 1, evidence.fitting(ROOMY_LIMIT_FRACTION)))
        if not self._compares_far or not FAR_ENOUGH * self._larger_size <= far < math.inf:
            return False
        self._compares_far = False
        self.size = math.floor(far)
        self._comparison.begin(self._comparison.usual)
        return True

    def _settle(self) -> None:
        self.phase = "settled"
        self.size = self._best_size
        self._goal = self.size

    def _grow(self, factor: int) -> bool:
        """Raise the size as far as ceiling, failures and memory allow; whether that is any further."""
        evidence = self.evidence
        most = min(self.size * factor, self.ceiling, evidence.smallest_failing - 1, evidence.fitting())
        larger = math.floor(self._share(most))
        if larger <= self.size:
            return False
        self.size = larger
        self._goal = larger
        return True

    def _share(self, size: float) -> float:
        """The largest equal share that is no larger."""
        if self.shares_of is None or not 1 <= size < math.inf:
            return size
        return math.ceil(self.shares_of / math.ceil(self.shares_of / math.floor(size)))

    def _maybe_reopen(self, costliest_item: int | None) -> None:
        """Once the items are much cheaper than when it settled, compare again."""
        if costliest_item is None or not self._grows or self.evidence.smallest_failing != math.inf:
            return
        if self._settled_item_cost == 0:
            self._settled_item_cost = costliest_item
        elif costliest_item < REOPEN_ITEM_COST * self._settled_item_cost:
            self._settled_item_cost = costliest_item
            self._begin_comparing()

    def _recover(self) -> bool:
        """After a failure: a step towards the goal, always below what is known to fail."""
        evidence = self.evidence
        if evidence.smallest_failing == math.inf:
            return False
        if self._quiet_batches >= FORGIVING_BATCHES:
            evidence.smallest_failing *= FORGIVEN_GROWTH
            self._goal = min(max(self._goal, FORGIVEN_GOAL * evidence.smallest_failing), self.ceiling)
        if self._quiet_batches < QUIET_BATCHES or self.size >= self._goal:
            return False
        # Half-way to the failure at most: the failing size is approached, not repeated.
        half_way = (self.size + evidence.smallest_failing) / 2
        most = min(self.size * 2, self._goal, half_way, evidence.smallest_failing - 1, evidence.fitting())
        grown = math.floor(most)
        if grown <= self.size:
            return False
        self._proven_size, self.size, self._quiet_batches = self.size, grown, 0
        return True


def _saved(value: Any) -> Any:
    """A value as JSON can hold it: there is no infinity in it."""
    if isinstance(value, (tuple, list)):
        return [_saved(one) for one in value]
    return "inf" if value == math.inf else value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(one) for one in value)
    return math.inf if value == "inf" else value
