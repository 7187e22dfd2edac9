"""Live work in windows: how long the next micro-batch of a training step may be.

A `LiveSizer` decides: it grows while that pays, halves after an out-of-memory error and grows back. What is added for
training: bytes of gradients and optimizer state that do not exist yet count as used, the first micro-batch at a new
size only warms up, and short ones are timed several times. An allocator that gives back its cache again and again makes
the size a little smaller, once it is settled as well. A failed window costs more than a failed batch: the size comes
back soon after the first failure, and half as fast after each further one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from brim.records import BatchSizes, Probe, Unit
from brim.sizing.constants import (
    FIRST_ITEMS,
    MOST_CUTS,
    MOST_TIMED_STEPS,
    OWN_BYTES_FRACTION,
    RETRYING_STEPS,
    TIMED_SECONDS,
    USABLE_LIMIT_FRACTION,
)
from brim.sizing.live import LiveSizer
from brim.sizing.older_checkpoints import micro_batch_state
from brim.sizing.sizer import Trial

__all__ = ["MicroBatchRequest", "MicroBatchSizer", "micro_batch_length"]

MICRO_BATCH_SIZER_SCHEMA = "brim.micro_batch_sizer/1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchRequest:
    """What is asked of micro-batches, and what is known before the first."""

    ceiling: int | None  # samples at most, as the user gave it; None: found
    fixed: bool = False  # exactly the ceiling; what does not fit is split for its window only
    known: int | None = None  # a size found before, in padded cost
    smallest: int = 1  # samples that a micro-batch must have: 2 where batch normalisation sees one value per channel
    unit: Unit = "samples"  # of a size that is found
    uniform: bool = True  # one sample costs as much as another
    limit_bytes: int | None = None
    largest: int = 2**31  # samples of the largest share of a window


class MicroBatchSizer:
    """The size of micro-batches, window by window, and the evidence for it."""

    def __init__(self, request: MicroBatchRequest) -> None:
        self.request = request
        self.agreed: float = math.inf  # what the other ranks allow
        self.absent_bytes = 0  # of what does not exist yet, and will
        self.oom_events = 0
        self.lengths: Counter[int] = Counter()  # of every micro-batch of a finished window, in samples
        self._steady_lengths: Counter[int] = Counter()  # of those windows that began after the size was found
        self._window: list[int] = []  # lengths of this window's
        self._began_settled = False
        self._tried: dict[int, Probe] = {}  # by length
        self._warm_size: int | None = None  # the size that a micro-batch has run at already
        self._timed: list[Trial] = []  # those after it, at the same size
        self._retrying_steps, self._cuts = 0, 0
        self._heaviest = 0  # the largest micro-batch of the last window, when settled
        self._troubled_windows, self._in_trouble = 0, False  # that ran out of memory, and whether this one has
        self._repeated: list[int] = []  # lengths of this window in the run that is being resumed
        self._split: int | None = None  # with a fixed size: what fits in this window
        self._settled_trial: Trial | None = None  # the largest micro-batch of this window, when settled
        self.live = self._make_live()

    def _make_live(self) -> LiveSizer:
        asked = self.request
        if asked.ceiling is not None:
            return LiveSizer(first=asked.ceiling, ceiling=asked.ceiling, grows=False, limit_bytes=asked.limit_bytes)
        ceiling = None if asked.unit == "tokens" else asked.largest
        if asked.known is not None:
            return LiveSizer(first=asked.known, ceiling=ceiling, known=True, limit_bytes=asked.limit_bytes)
        return LiveSizer(
            first=max(FIRST_ITEMS, asked.smallest),
            ceiling=ceiling,
            compares_far=True,
            steady=asked.uniform,
            shares_of=ceiling,
            limit_bytes=asked.limit_bytes,
        )

    @property
    def by_count(self) -> bool:
        """Whether the size counts samples, whatever they cost."""
        return self.request.ceiling is not None or self.request.unit == "samples"

    @property
    def settled(self) -> bool:
        """Whether the size is found: micro-batches are no longer timed."""
        return self.live.settled

    @property
    def new(self) -> bool:
        """Whether the next micro-batch is the first at its size, while the size is searched for."""
        return not self.settled and self._warm_size != self.live.size

    def next_size(self) -> int:
        """What the next micro-batch may have at most: samples, or padded cost."""
        if self._split is not None:
            return self._split
        if self.request.fixed:
            return self.live.size
        return max(int(min(self.live.size, self.agreed, max(self._fitting(), 1))), 1)

    def wish(self, *, in_step: bool = False) -> int:
        """What this rank would allow, whatever the others allow.

        In step with others an out-of-memory error ends the run: then no further than a line through what has been
        seen, from nothing, allows.
        """
        wished: float = min(self.live.size, max(self._fitting(), 1))
        curve = self.live.evidence.bytes
        if in_step and self.request.limit_bytes is not None and curve.points:
            wished = min(wished, curve.proportionally_within(round(USABLE_LIMIT_FRACTION * self.request.limit_bytes)))
        return max(int(wished), 1)

    def begin_window(self, costliest: int = 1) -> None:
        """A new window: a fixed size is tried in full again; the first size in tokens fits two of the costliest."""
        self._split, self._window, self._in_trouble = None, [], False
        self._began_settled = self.settled
        if self.request.unit == "tokens" and self.request.ceiling is None and not self._tried:
            self.live.size = max(self.live.size, max(FIRST_ITEMS, self.request.smallest) * costliest)

    def next_length(self, left: int, costliest: int = 1) -> int:
        """Of so many samples, the costliest first, how many come next."""
        if self._repeated:
            return min(self._repeated.pop(0), left)
        even = self.by_count and self.settled and not self.request.fixed
        costliest = 1 if self.by_count else costliest
        return micro_batch_length(
            left, self.next_size(), costliest=costliest, smallest=self.request.smallest, even=even
        )

    def record(self, probe: Probe, left_bytes: int | None = None) -> None:
        """What happened to a micro-batch; once the size is settled it has no time.

        `left_bytes` is what other processes left of the device, where it failed or the allocator had to retry.
        """
        if probe.verdict in ("fits", "thrashes"):
            self._ran(probe, left_bytes)
        else:
            self._ran_out(probe, left_bytes)

    def _ran(self, probe: Probe, left_bytes: int | None) -> None:
        self._window.append(probe.batch_size)
        trial = self._trial(probe)
        self._remember(probe)
        if self.settled:
            if self._settled_trial is None or trial.size > self._settled_trial.size:
                self._settled_trial = trial
            return
        live, retried = self.live, probe.alloc_retries > 0
        if retried and live.evidence.others_hold(left_bytes):
            return  # they took the memory: that says nothing of the size
        if retried and self._warm_size == live.size:
            live.record(dataclasses.replace(trial, verdict="thrashes"))
            return
        if self.new:  # before it the cache was given back
            live.evidence.cache_given_back()
        if trial.peak_bytes is not None and not retried:  # what the limit has cut short says nothing of the rise
            live.evidence.observe_bytes(trial.size, trial.peak_bytes)
            if (fitting := self._fitting()) < live.size:
                live.keep_within(int(fitting))
        if self._is_rest(trial.size):
            return
        if self._warm_size != live.size:
            self._warm_size, self._timed = live.size, []
            return
        self._timed.append(trial)
        if len(self._timed) >= MOST_TIMED_STEPS or sum(one.seconds or 0.0 for one in self._timed) >= TIMED_SECONDS:
            best = max(self._timed, key=lambda one: one.rate)
            self._timed = []
            live.record(dataclasses.replace(best, peak_bytes=trial.peak_bytes))

    def _trial(self, probe: Probe) -> Trial:
        """The micro-batch in the unit of the size, with bytes that will be there as well."""
        peak = probe.peak_reserved_bytes
        return Trial(
            size=probe.batch_size if self.by_count else probe.cost or probe.batch_size,
            seconds=probe.step_seconds,
            peak_bytes=None if peak is None else peak + self.absent_bytes,
        )

    def _is_rest(self, size: int) -> bool:
        """Whether it was what was left of a window: neither a warm-up for the size nor a trial of it."""
        enough = OWN_BYTES_FRACTION if self.by_count and len(self._window) > 1 else 0.5
        return not enough * self.live.size < size <= self.live.size

    def end_window(self) -> None:
        """The window is done: so many quiet batches, fewer with every window that failed."""
        self.lengths.update(self._window)
        if self._began_settled:
            self._steady_lengths.update(self._window)
        if self._settled_trial is not None and not self._in_trouble:
            trial = self._settled_trial
            self._heaviest = trial.size
            for _ in range(max(len(self._window) >> max(self._troubled_windows - 1, 0), 1)):
                self.live.record(dataclasses.replace(trial, peak_bytes=trial.peak_bytes or None))
        self._settled_trial = None

    def stepped(self, retries: int, left_bytes: int | None = None) -> bool:
        """A whole step is done, the optimizer's part too, with so many retries of the allocator.

        Whether micro-batches are smaller from here on. Retries while others held the memory do not count.
        """
        own = retries > 0 and not self.live.evidence.others_hold(left_bytes)
        self._retrying_steps = self._retrying_steps + 1 if own and self.settled else 0
        may_cut = not self.request.fixed and self._heaviest > 1 and self._cuts < MOST_CUTS
        if not may_cut or self._retrying_steps < RETRYING_STEPS:
            return False
        self._retrying_steps, self._cuts = 0, self._cuts + 1
        self.live.record(Trial(size=self._heaviest, verdict="thrashes"))
        return True

    def _ran_out(self, probe: Probe, left_bytes: int | None) -> None:
        """It did not fit: the window begins again with smaller ones.

        Where other processes left too little, that does not count as a failure of this run.
        """
        trial = self._trial(probe)
        self.oom_events += 1
        self._settled_trial, self._window, self._repeated = None, [], []
        self._troubled_windows += not self._in_trouble and not self.live.evidence.others_hold(left_bytes)
        self._in_trouble = True
        known = self._tried.get(probe.batch_size)
        if known is None or not known.fits:
            self._tried[probe.batch_size] = probe
        if self.request.fixed:
            self._split = max(trial.size // 2, 1)
        else:
            self.live.note_others(left_bytes)
            self.live.record(dataclasses.replace(trial, verdict="oom"))

    def repeat(self, lengths: list[int] | None) -> None:
        """Cut the next window as it was cut before: a resumed run gives the same losses."""
        self._repeated = list(lengths or ())

    def agree(self, size: int, *, others_settled: bool) -> None:
        """The smallest size of all ranks holds for this one, whose own search continues from there."""
        self.agreed = size
        if self.settled or size >= self.live.size:
            return
        if others_settled:
            self.live.ceiling = size  # no larger size is needed: it ends its search here
        self.live.size = size

    def allow(self, largest: int) -> None:
        """Windows have grown: micro-batches may too, and from here on it is compared whether that pays."""
        live = self.live
        if self.request.ceiling is not None or self.request.unit == "tokens" or largest <= live.ceiling:
            return
        if not live.settled or live.kept < live.ceiling:
            live.ceiling = live.shares_of = largest  # it was not the ceiling that kept it there
            return
        reopened = LiveSizer(
            first=live.kept,
            ceiling=largest,
            likely=True,
            compares_far=True,
            steady=self.request.uniform,
            shares_of=largest,
            limit_bytes=self.request.limit_bytes,
        )
        for size, peak in live.evidence.bytes.points:
            reopened.evidence.bytes.observe(size, peak)
        self.live = reopened

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

    def hopeless(self, length: int, cost: int | None = None) -> bool:
        """Whether a micro-batch of this length, and cost, cannot be made smaller.

        At the smallest size a part may still be longer, where what is left over would be too short to run alone.
        """
        each = 1 if self.by_count or cost is None else max(cost // length, 1)
        at_smallest = self.next_size() // each <= self.request.smallest
        return length <= self.request.smallest or (at_smallest and length < 2 * self.request.smallest)

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Every length that was tried while the size was searched for, or that did not fit."""
        return tuple(self._tried[length] for length in sorted(self._tried))

    def _fitting(self) -> float:
        """The largest size that the bytes so far allow; without two points, no bound."""
        limit = self.request.limit_bytes
        if limit is None:
            return math.inf
        # A size that ran is no guess: the curve through noisy points may lie below it.
        proven = max((size for size, peak in self.live.evidence.bytes.points if peak <= limit), default=0)
        return max(self.live.evidence.fitting(), proven)

    def _remember(self, probe: Probe) -> None:
        """Keep one record per length: its best time, the bytes of its last trial."""
        before = self._tried.get(probe.batch_size)
        if self.settled and before is not None:
            return
        times = (probe.step_seconds, before.step_seconds if before else None)
        best = min((seconds for seconds in times if seconds is not None), default=None)
        self._tried[probe.batch_size] = dataclasses.replace(
            probe,
            step_seconds=best,
            samples_per_second=None if best is None else probe.batch_size / max(best, 1e-9),
            steps=1 + (before.steps if before else 0),
        )

    def to_json(self) -> dict[str, Any]:
        """The schedule of micro-batches as a checkpoint keeps it."""
        return {
            "schema": MICRO_BATCH_SIZER_SCHEMA,
            "sizer": self.live.to_json(),
            "warm_size": self._warm_size,
            "oom_events": self.oom_events,
            "troubled_windows": self._troubled_windows,
            "lengths": sorted(self.lengths.items()),
            "steady_lengths": sorted(self._steady_lengths.items()),
            "trials": [probe.to_json() for probe in self._tried.values()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue where `to_json` was called, by this version or an earlier one."""
        state = micro_batch_state(data)
        self.live.restore(state["sizer"])
        self._warm_size = state["warm_size"]
        self.oom_events, self._troubled_windows = state["oom_events"], state["troubled_windows"]
        self.lengths = Counter(dict(state["lengths"]))
        self._steady_lengths = Counter(dict(state["steady_lengths"]))
        self._tried = {probe["batch_size"]: Probe.from_json(probe) for probe in state["trials"]}


def micro_batch_length(left: int, size: int, *, costliest: int = 1, smallest: int = 1, even: bool = True) -> int:
    """How many of the samples left make the next micro-batch under a size in padded cost, the costliest first.

    `even` is for samples of one cost: parts differ by one at most, so that 65 under a size of 64 are 33 and 32, not 64
    and a lone one. Without it each part is as long as the size allows. Nothing shorter than `smallest` is left over,
    and nothing shorter is cut, even where it is past the size.
    """
    most = max(size // costliest, 1)
    if even:
        parts = min(math.ceil(left / most), max(left // smallest, 1))
        return math.ceil(left / parts)
    length = min(max(most, smallest), left)
    if 0 < left - length < smallest:
        length = left - smallest if left - smallest >= smallest else left
    return length
