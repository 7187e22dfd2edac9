"""How long the next micro-batch may be: found on the run's own micro-batches, lowered by an out-of-memory error.

The governor of evaluations decides (`running/governor.py`): it grows while that pays, halves after an out-of-memory
error and grows back. What is added for training: bytes of gradients and optimizer state that do not exist yet count as
used, the first micro-batch at a new size only warms up, and short ones are timed several times. An allocator that gives
back its cache again and again makes the size a little smaller, once it is settled as well. A failed window costs
more than a failed batch: the size comes back soon after the first trouble, and half as fast after each further one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from brim.memory.devices import Reading
from brim.records import BatchSizes, Probe, Unit
from brim.running.governor import NEARLY, USABLE, Governor
from brim.training.windows import micro_batch_length

__all__ = ["MicroSizes", "SizeRequest"]

FIRST_SAMPLES = 2  # of the first micro-batch
LOOK_SECONDS = 0.1  # a size is looked at for so long: short steps are timed several times, and the best one counts
MOST_LOOKS = 4
RETRYING_STEPS = 3  # in a row, in which the allocator gave back its cache: once or twice is putting it in order
MOST_CUTS = 3  # for that: lengths that change from step to step may cost a retry at any size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What is asked of micro-batches, and what is known before the first."""

    ceiling: int | None  # samples at most, as the user gave it; None: found
    fixed: bool = False  # exactly the ceiling; what does not fit is split for its window only
    known: int | None = None  # a cap found before, in padded cost
    smallest: int = 1  # samples that a micro-batch must have: 2 where batch normalisation sees one value per channel
    unit: Unit = "samples"  # of a cap that is found
    uniform: bool = True  # one sample costs as much as another
    limit_bytes: int | None = None
    largest: int = 2**31  # samples of the largest share of a window


class MicroSizes:
    """The cap on a micro-batch, and the evidence for it."""

    def __init__(self, request: SizeRequest) -> None:
        self.request = request
        self.agreed: float = math.inf  # what the other ranks allow
        self.reserved_bytes = 0  # for what does not exist yet
        self.oom_events = 0
        self.lengths: Counter[int] = Counter()  # of every micro-batch of a finished window, in samples
        self._steady_lengths: Counter[int] = Counter()  # of those windows that began after the size was found
        self._window: list[int] = []  # lengths of this window's
        self._began_settled = False
        self._tried: dict[int, Probe] = {}  # by length
        self._warm_cap: int | None = None  # the cap that a micro-batch has run at already
        self._looks: list[tuple[int, float]] = []  # weight and seconds of those after it, at the same cap
        self._retrying_steps, self._cuts = 0, 0
        self._heaviest = 0  # the largest micro-batch of the last window, when settled
        self._troubles, self._in_trouble = 0, False  # windows that ran out of memory, and whether this one has
        self._repeated: list[int] = []  # lengths of this window in the run that is being resumed
        self._split: int | None = None  # with a fixed size: what fits in this window
        self._settled_cost: tuple[int, int] | None = None  # the largest micro-batch of this window, when settled
        self.governor = self._make_governor()

    def _make_governor(self) -> Governor:
        asked = self.request
        if asked.ceiling is not None:
            return Governor(first=asked.ceiling, ceiling=asked.ceiling, grows=False, limit_bytes=asked.limit_bytes)
        ceiling = None if asked.unit == "tokens" else asked.largest
        if asked.known is not None:
            return Governor(first=asked.known, ceiling=ceiling, cap_known=True, limit_bytes=asked.limit_bytes)
        first = max(FIRST_SAMPLES, asked.smallest)
        return Governor(
            first=first,
            ceiling=ceiling,
            looks_far=True,
            steady=asked.uniform,
            shares_of=ceiling,
            limit_bytes=asked.limit_bytes,
        )

    @property
    def by_count(self) -> bool:
        """Whether the cap counts samples, whatever they cost."""
        return self.request.ceiling is not None or self.request.unit == "samples"

    @property
    def settled(self) -> bool:
        """Whether the size is found: micro-batches are no longer timed."""
        return self.governor.settled

    @property
    def new(self) -> bool:
        """Whether the next micro-batch is the first at its size, while the size is looked for."""
        return not self.settled and self._warm_cap != self.governor.cap

    @property
    def cap(self) -> int:
        """What the next micro-batch may weigh: samples, or padded cost."""
        if self._split is not None:
            return self._split
        if self.request.fixed:
            return self.governor.cap
        cap = min(self.governor.cap, self.agreed, max(self._fitting(), 1))
        return max(int(cap), 1)

    def wish(self, *, in_step: bool = False) -> int:
        """What this rank would allow, whatever the others say.

        In step with others an out-of-memory error ends the run: then no further than a line through what has been
        seen, from nothing, allows.
        """
        wished: float = min(self.governor.cap, max(self._fitting(), 1))
        if in_step and self.request.limit_bytes is not None and self.governor.model.points:
            wished = min(wished, self.governor.model.proportionally_within(round(USABLE * self.request.limit_bytes)))
        return max(int(wished), 1)

    def begin_window(self, dearest: int = 1) -> None:
        """A new window: a fixed size is tried in full again; the first cap in tokens fits two of the dearest."""
        self._split, self._window, self._in_trouble = None, [], False
        self._began_settled = self.settled
        if self.request.unit == "tokens" and self.request.ceiling is None and not self._tried:
            first = max(FIRST_SAMPLES, self.request.smallest) * dearest
            self.governor.cap = max(self.governor.cap, first)

    def next_length(self, left: int, dearest: int = 1) -> int:
        """Of so many samples, the dearest first, how many come next."""
        if self._repeated:
            return min(self._repeated.pop(0), left)
        even = self.by_count and self.settled and not self.request.fixed
        dearest = 1 if self.by_count else dearest
        return micro_batch_length(left, self.cap, dearest=dearest, smallest=self.request.smallest, even=even)

    def ran(
        self, cost: int, length: int, seconds: float | None, reading: Reading | None, left_bytes: int | None = None
    ) -> None:
        """A micro-batch of this padded cost is done; `seconds` is None once the size is settled.

        `left_bytes` is what other processes left of the device, where the allocator had to give back its cache.
        """
        self._window.append(length)
        weight = length if self.by_count else cost
        peak = None if reading is None else reading.peak_reserved_bytes + self.reserved_bytes
        self._remember(length, cost, seconds, reading)
        if self.settled:
            if self._settled_cost is None or weight > self._settled_cost[0]:
                self._settled_cost = (weight, peak or 0)
            return
        retried = reading is not None and reading.alloc_retries > 0
        if retried and self.governor.others_hold(left_bytes):
            return  # they took the memory: that says nothing of the size
        if retried and self._warm_cap == self.governor.cap:
            self.governor.ran_short(weight)
            return
        if self.new:  # before it the cache was given back
            self.governor.cache_given_back()
        if peak is not None and not retried:  # what the limit has cut short says nothing of the rise
            self.governor.took(weight, peak)
            if (fitting := self._fitting()) < self.governor.cap:
                self.governor.keep_within(int(fitting))
        if self._is_rest(weight):
            return
        if self._warm_cap != self.governor.cap:
            self._warm_cap, self._looks = self.governor.cap, []
            return
        assert seconds is not None
        self._looks.append((weight, seconds))
        if len(self._looks) >= MOST_LOOKS or sum(look for _, look in self._looks) >= LOOK_SECONDS:
            best, taken = max(self._looks, key=lambda look: look[0] / max(look[1], 1e-9))
            self._looks = []
            self.governor.succeeded(best, taken, peak)

    def _is_rest(self, weight: int) -> bool:
        """Whether it was what was left of a window: neither a warm-up for the cap's size nor a look at it."""
        cap = self.governor.cap
        enough = NEARLY if self.by_count and len(self._window) > 1 else 0.5
        return not enough * cap < weight <= cap

    def end_window(self) -> None:
        """The window is done: for the governor so many quiet batches, fewer with every window that had trouble."""
        self.lengths.update(self._window)
        if self._began_settled:
            self._steady_lengths.update(self._window)
        if self._settled_cost is not None and not self._in_trouble:
            weight, peak = self._settled_cost
            self._heaviest = weight
            for _ in range(max(len(self._window) >> max(self._troubles - 1, 0), 1)):
                self.governor.succeeded(weight, 0.0, peak or None)
        self._settled_cost = None

    def stepped(self, retries: int, left_bytes: int | None = None) -> bool:
        """A whole step is done, the optimizer's part too, with so many retries of the allocator.

        Whether micro-batches are smaller from here on. Retries while others held the memory do not count.
        """
        own = retries > 0 and not self.governor.others_hold(left_bytes)
        self._retrying_steps = self._retrying_steps + 1 if own and self.settled else 0
        may_cut = not self.request.fixed and self._heaviest > 1 and self._cuts < MOST_CUTS
        if not may_cut or self._retrying_steps < RETRYING_STEPS:
            return False
        self._retrying_steps, self._cuts = 0, self._cuts + 1
        self.governor.ran_short(self._heaviest)
        return True

    def return_after_others(self, left_bytes: int | None) -> bool:
        """Between two windows: whether others have given back what they left too little of, and the size is back."""
        return self.governor.return_after_others(left_bytes)

    def ran_out(self, cost: int, length: int, detail: str, left_bytes: int | None = None) -> None:
        """A micro-batch of this padded cost did not fit: the window begins again with smaller ones.

        Where other processes left too little, which `left_bytes` says, that does not count as trouble of our own.
        """
        weight = length if self.by_count else cost
        self.oom_events += 1
        self._settled_cost, self._window, self._repeated = None, [], []
        self._troubles += not self._in_trouble and not self.governor.others_hold(left_bytes)
        self._in_trouble = True
        known = self._tried.get(length)
        if known is None or not known.fits:
            self._tried[length] = Probe(batch_size=length, cost=cost, verdict="oom", detail=detail)
        if self.request.fixed:
            self._split = max(weight // 2, 1)
        else:
            self.governor.note_others(left_bytes)
            self.governor.ran_out(weight)

    def repeat(self, lengths: list[int] | None) -> None:
        """Cut the next window as it was cut before: a resumed run gives the same losses."""
        self._repeated = list(lengths or ())

    def agree(self, cap: int, *, others_settled: bool) -> None:
        """The smallest cap of all ranks holds for this one, whose own search goes on from there."""
        self.agreed = cap
        if self.settled or cap >= self.governor.cap:
            return
        if others_settled:
            self.governor.ceiling = cap  # nobody will go further: it ends its search here
        self.governor.cap = cap

    def allow(self, largest: int) -> None:
        """Windows have grown: micro-batches may too, and from here on it is compared whether that pays."""
        governor = self.governor
        if self.request.ceiling is not None or self.request.unit == "tokens" or largest <= governor.ceiling:
            return
        reopened = Governor(
            first=governor.kept,
            ceiling=largest,
            cap_likely=True,
            looks_far=True,
            steady=self.request.uniform,
            shares_of=largest,
            limit_bytes=self.request.limit_bytes,
        )
        if not governor.settled or governor.kept < governor.ceiling:
            governor.ceiling = governor.shares_of = largest  # it was not the ceiling that kept it there
            return
        for size, peak in governor.model.points:
            reopened.model.observe(size, peak)
        self.governor = reopened

    def sizes_used(self) -> BatchSizes | None:
        """The lengths of the micro-batches that finished windows were made of.

        The median counts samples, and only those after the size was found, if there are any: it is what the run
        settled at, not what the search has passed.
        """
        if not self.lengths:
            return None
        counted = self._steady_lengths or self.lengths
        half, seen, median = sum(length * count for length, count in counted.items()) / 2, 0, 0
        for length in sorted(counted):
            seen += length * counted[length]
            if seen >= half:
                median = length
                break
        return BatchSizes(smallest=min(self.lengths), median=median, largest=max(self.lengths))

    def hopeless(self, length: int) -> bool:
        """Whether a micro-batch of this length cannot be made smaller."""
        return length <= self.request.smallest

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Every length that was tried while the size was looked for, or that did not fit."""
        return tuple(self._tried[length] for length in sorted(self._tried))

    def _fitting(self) -> float:
        """The largest cap that the byte model expects to fit; without two points, no bound."""
        limit = self.request.limit_bytes
        if limit is None:
            return math.inf
        # A size that ran is no guess: the curve through noisy points may lie below it.
        proven = max((size for size, peak in self.governor.model.points if peak <= limit), default=0)
        return max(self.governor.fitting(), proven)

    def _remember(self, length: int, cost: int, seconds: float | None, reading: Reading | None) -> None:
        before = self._tried.get(length)
        if self.settled and before is not None:
            return
        best = min(
            (value for value in (seconds, before.step_seconds if before else None) if value is not None), default=None
        )
        self._tried[length] = Probe(
            batch_size=length,
            cost=cost,
            verdict="thrashes" if reading is not None and reading.alloc_retries else "fits",
            peak_allocated_bytes=None if reading is None else reading.peak_allocated_bytes,
            peak_reserved_bytes=None if reading is None else reading.peak_reserved_bytes,
            alloc_retries=0 if reading is None else reading.alloc_retries,
            step_seconds=best,
            samples_per_second=None if best is None else length / max(best, 1e-9),
            steps=1 + (before.steps if before else 0),
        )

    def to_json(self) -> dict[str, Any]:
        """The micro-batch schedule as a checkpoint keeps it."""
        return {
            "governor": self.governor.to_json(),
            "warm_cap": self._warm_cap,
            "oom_events": self.oom_events,
            "troubles": self._troubles,
            "lengths": sorted(self.lengths.items()),
            "steady_lengths": sorted(self._steady_lengths.items()),
            "probes": [probe.to_json() for probe in self._tried.values()],
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Go on where `to_json` was called."""
        self.governor.restore(data["governor"])
        self._warm_cap = data["warm_cap"]
        self.oom_events, self._troubles = data["oom_events"], data["troubles"]
        self.lengths = Counter(dict(data["lengths"]))
        self._steady_lengths = Counter(dict(data.get("steady_lengths", ())))
        self._tried = {probe["batch_size"]: Probe.from_json(probe) for probe in data["probes"]}
