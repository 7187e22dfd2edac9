"""The interface between what runs batches and what decides their size: ask for a size, record what happened.

    while not sizer.settled:
        sizer.record(run_batch(sizer.next_size()))

A size counts samples, padded cost or bytes of keys and values: the caller's unit. Nothing here runs anything.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Self

from brim.errors import RequestError
from brim.records import Probe, Verdict
from brim.settings.caller import given
from brim.sizing.byte_model import ByteModel
from brim.sizing.constants import OWN_BYTES_FRACTION, USABLE_LIMIT_FRACTION

__all__ = ["Evidence", "ProbingSizer", "SizeGrid", "Sizer", "Trial"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeGrid:
    """Allowed sizes from `first` to `last`, walked with `floor` and `up`."""

    last: int
    smallest: int = 1  # below this a step makes no sense (batch norm over one value)
    multiple_of: int = 1
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise RequestError(
                f"no batch size is allowed up to {self.last}: the smallest is {self.first} "
                f"({given('multiple_of', self.multiple_of)}, and the model needs {self.smallest})"
            )

    @property
    def first(self) -> int:
        """The smallest allowed size."""
        first = -(-self.smallest // self.multiple_of) * self.multiple_of
        return 1 << (first - 1).bit_length() if self.power_of_two else first

    def floor(self, size: float) -> int:
        """The largest allowed size that is at most `size`, 0 when there is none."""
        whole = min(int(size), self.last)
        if whole < self.first:
            return 0
        if self.power_of_two:
            return 1 << (whole.bit_length() - 1)
        return whole - whole % self.multiple_of

    def up(self, size: int) -> int:
        """The next allowed size above `size`; it may lie past `last`."""
        if size < self.first:
            return self.first
        if self.power_of_two:
            return 1 << size.bit_length()
        return size - size % self.multiple_of + self.multiple_of

    def between(self, size: float, low: int, high: int) -> int:
        """The allowed size nearest below `size` that lies strictly between `low` and `high`."""
        size = self.floor(min(size, high - 1))
        return size if size > low else self.up(low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What happened to one batch."""

    size: int  # in the sizer's unit; it may be smaller than asked
    verdict: Verdict = "fits"
    seconds: float | None = None  # of one step
    peak_bytes: int | None = None  # reserved, with what does not exist yet
    allocated_bytes: int | None = None
    costliest_item: int | None = None  # the cost of the batch's costliest item
    needed_bytes: int | None = None  # at least, by a batch that did not fit
    progress: float | None = None  # how far a batch had come when it did not fit, of its memory; None: not known

    @classmethod
    def of_probe(cls, probe: Probe) -> Self:
        """A probe of so many samples."""
        return cls(
            size=probe.batch_size,
            verdict=probe.verdict,
            seconds=probe.step_seconds,
            peak_bytes=probe.peak_reserved_bytes,
            allocated_bytes=probe.peak_allocated_bytes,
        )

    @property
    def fits(self) -> bool:
        """Whether it ran within the memory limit."""
        return self.verdict == "fits"

    @property
    def rate(self) -> float:
        """Size per second; 0 where it was not timed."""
        return 0.0 if self.seconds is None else self.size / max(self.seconds, 1e-9)


class Evidence:
    """What trials have shown under one memory limit: bytes over size, and which size is too large.

    `limit_bytes` None: there is no limit to keep to, and bytes decide nothing.
    """

    def __init__(self, bytes_over_size: ByteModel, *, limit_bytes: int | None) -> None:
        self.bytes = bytes_over_size
        self.limit_bytes = limit_bytes
        self.smallest_failing: float = math.inf
        self.largest_since_release = 0  # the largest batch since the allocator gave back its cache

    def observe_bytes(self, size: int, peak_bytes: int) -> None:
        """The peak of a batch. After a larger one the allocator holds that one's bytes, which say nothing of this."""
        if size >= OWN_BYTES_FRACTION * self.largest_since_release:
            self.bytes.observe(size, peak_bytes)
        self.largest_since_release = max(self.largest_since_release, size)

    def cache_given_back(self) -> None:
        """From here on a batch's peak is its own."""
        self.largest_since_release = 0

    def fitting(self, share: float = USABLE_LIMIT_FRACTION) -> float:
        """The largest size expected to fit into a share of the limit; infinite where nothing is known.

        After a first batch that is a line from what is resident, where that is known.
        """
        if self.limit_bytes is None:
            return math.inf
        room = round(share * self.limit_bytes)
        within: float | None = self.bytes.largest_within(room)
        if within is None and self.bytes.base_bytes > 0 and len(self.bytes.points) == 1:
            within = self.bytes.proportionally_within(room)
        return math.inf if within is None else within

    def others_hold(self, left_bytes: int | None) -> bool:
        """Whether other processes leave less of the device than sizes are chosen for; None: that is not known."""
        if left_bytes is None or self.limit_bytes is None:
            return False
        return left_bytes < USABLE_LIMIT_FRACTION * self.limit_bytes


class Sizer(abc.ABC):
    """Chooses sizes by what is recorded of earlier ones."""

    @property
    @abc.abstractmethod
    def settled(self) -> bool:
        """Whether the size is found; live work continues at it, and may reopen the question."""

    @abc.abstractmethod
    def next_size(self) -> int:
        """The size to run next; once settled, the size found."""

    @abc.abstractmethod
    def record(self, trial: Trial) -> None:
        """What happened at a size, most often the one asked for."""


class ProbingSizer(Sizer):
    """A strategy that is given probes, each from an emptied cache, until the choice is made."""

    largest = 0  # the largest size seen to fit

    def __init__(self, evidence: Evidence, grid: SizeGrid) -> None:
        assert evidence.limit_bytes is not None
        self.evidence = evidence
        self.grid = grid
        self._bytes = evidence.bytes
        self._limit_bytes = evidence.limit_bytes
        self._next = self._propose()

    @property
    def settled(self) -> bool:
        """Whether no further probe is wanted."""
        return self._next is None

    @abc.abstractmethod
    def chosen(self) -> Trial | None:
        """The trial of the size found so far; None where none fits."""

    def next_size(self) -> int:
        """The size to probe next; once settled, the one chosen, and 0 where none fits."""
        if self._next is not None:
            return self._next
        chosen = self.chosen()
        return 0 if chosen is None else chosen.size

    def record(self, trial: Trial) -> None:
        """Take in the probe of the size asked for."""
        self._take(trial)
        self._next = self._propose()

    @property
    def _fails_from(self) -> int:
        """The smallest size known, or out of bounds, not to fit."""
        return int(min(self.evidence.smallest_failing, self.grid.last + 1))

    def _observe(self, trial: Trial) -> None:
        if trial.fits:
            assert trial.peak_bytes is not None
            self._bytes.observe(trial.size, trial.peak_bytes)
        else:
            self.evidence.smallest_failing = min(self.evidence.smallest_failing, trial.size)

    @abc.abstractmethod
    def _take(self, trial: Trial) -> None:
        """Take in a probe."""

    @abc.abstractmethod
    def _propose(self) -> int | None:
        """The size to probe next; None when the choice is made. Called once after each probe."""
