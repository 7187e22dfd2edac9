"""A whole function at one size: after an out-of-memory error the next smaller size, by bytes.

The function is somebody's entire training. It is run again only after it failed, so that sizes only fall until one has
run; nothing can be tried above it. What a failure shows is a bound: so many bytes were needed at least. How far the
function had come then (`progress`) says how much of its memory that was. Sizes that have run give the bytes of later
calls. Runs nothing, and does not know what the function does.
"""

from __future__ import annotations

import math

from brim.sizing.byte_model import ByteModel
from brim.sizing.constants import (
    ALLOCATOR_NOISE,
    FURTHER,
    LEAST_FALL,
    MOST_FALL,
    SMALLER_BY,
    USABLE_LIMIT_FRACTION,
)
from brim.sizing.sizer import Evidence, Sizer, Trial

__all__ = ["FallingSizer"]


class FallingSizer(Sizer):
    """The size of the next call of a function.

        sizer = FallingSizer(first=128)
        sizer.record(Trial(size=128, verdict="oom", needed_bytes=30 * 2**30))
        sizer.next_size()                    # 64; 0 once not even one fits

    `begin` is given what the next run of the function may use. With `ceiling`, `begin_call` lets a later call
    start above the size that has run, as far as its bytes allow.
    """

    def __init__(self, *, first: int, ceiling: int | None = None) -> None:
        self.evidence = Evidence(ByteModel(noise=ALLOCATOR_NOISE), limit_bytes=None)
        self._size = first
        self._ceiling = ceiling
        self.largest_run = 0
        self._expected: float | None = None  # what fits by how far the last failure had come, where that was known
        self._last: Trial | None = None  # that failed in this call

    @property
    def settled(self) -> bool:
        """Whether a call has returned."""
        return self.largest_run > 0

    def begin(self, *, limit_bytes: int | None, resident_bytes: int = 0) -> None:
        """What the next call may use, and what is in use before it, whatever its size."""
        self.evidence.limit_bytes = limit_bytes
        self.evidence.bytes.base_bytes = resident_bytes

    def begin_call(self) -> None:
        """A call of its own begins: at a larger size if that was asked for and the bytes allow it."""
        self._expected = self._last = None
        if self._ceiling is None or not self.settled:
            return
        fitting = self._fitting()
        most = min(self._ceiling, self.evidence.smallest_failing - 1, 0 if fitting is None else fitting)
        self._size = max(math.floor(most), self._size)

    def next_size(self) -> int:
        """The size of the next call; 0 where not even one fits."""
        return self._size

    def set_next(self, size: int) -> None:
        """A size that the user has chosen instead."""
        self._size = size

    def record(self, trial: Trial) -> None:
        """A call has returned, or ran out of memory."""
        if trial.verdict in ("fits", "thrashes"):
            self.largest_run = max(self.largest_run, trial.size)
            self._expected = self._last = None
            if trial.peak_bytes:
                self.evidence.bytes.observe(trial.size, trial.peak_bytes)
            return
        self.evidence.smallest_failing = min(self.evidence.smallest_failing, trial.size)
        self._size = self._below(trial)

    def _below(self, trial: Trial) -> int:
        if trial.size <= 1:
            return 0
        progress = trial.progress
        if progress is None and self._expected is not None:  # it has passed the place that a larger one failed at
            progress = self._expected / trial.size
        if self._stays_at_its_place(trial):
            progress = 1.0
        self._expected = None if progress is None else min(progress, 1.0) * trial.size
        fall = MOST_FALL if progress is None else min(max(progress, MOST_FALL), LEAST_FALL)
        wanted = trial.size * fall
        known = self._fitting()  # where a size has run, its bytes say more than how far this one has come …
        if known is not None and (known < trial.size or self._last is None):  # … unless they are wrong twice
            wanted = min(known, trial.size * LEAST_FALL)
        self._last = trial
        wanted = min(wanted, self._bound(trial))
        if self.largest_run < trial.size:  # what has run is smaller, and is not passed over
            wanted = max(wanted, self.largest_run)
        return max(math.floor(min(wanted, trial.size - 1)), 1)

    def _stays_at_its_place(self, trial: Trial) -> bool:
        """Whether a much smaller size came no further than the one before: that place is what needs most memory.

        So it is in a forward that keeps nothing; the bytes needed there say what fits.
        """
        last = self._last
        if last is None or last.progress is None or trial.progress is None or trial.size > SMALLER_BY * last.size:
            return False
        return trial.progress < FURTHER * last.progress

    def _fitting(self) -> float | None:
        """The largest size that should fit by those that have run; None without."""
        evidence = self.evidence
        if evidence.limit_bytes is None or not evidence.bytes.points:
            return None
        room = round(USABLE_LIMIT_FRACTION * evidence.limit_bytes)
        within: float | None = evidence.bytes.largest_within(room)
        return evidence.bytes.proportionally_within(room) if within is None else within

    def _bound(self, trial: Trial) -> float:
        """No larger size can fit, if bytes grow at most in proportion from what is resident."""
        limit, base = self.evidence.limit_bytes, self.evidence.bytes.base_bytes
        if limit is None or trial.needed_bytes is None or trial.needed_bytes <= max(base, limit):
            return math.inf
        return trial.size * max(limit - base, 0) / (trial.needed_bytes - base)
