"""How many sequences a generation pool has, and slots for their keys and values.

More rows are never slower until memory ends (docs/measurements/eval.md): a step reads the weights once for all of them.
So the size is what fits, by bytes that are measured on the first prompts: what reading a chunk takes beside weights,
keys and values, and what a slot takes. Where reading takes most of the room, chunks are halved and measured again. An
out-of-memory error at the size found leaves a fraction of it, until processes that held the rest have given it back.
Pure.
"""

from __future__ import annotations

import dataclasses
import itertools

from brim.sizing.constants import (
    MOST_CALM_READINGS,
    MOST_CHUNK_HALVINGS,
    MOST_POOL_FAILURES,
    MOST_POOL_ROWS,
    POOL_AFTER_FAILURE,
    POOL_LIMIT_FRACTION,
    POOL_READING_FRACTION,
    POOL_REFILL_FRACTION,
    POOL_ROWS_FRACTION,
)

__all__ = ["PoolNeeds", "PoolSize", "PoolSizer", "start_pool"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSize:
    """At most so many sequences, in so many slots; prompts are read in chunks that were halved so many times."""

    rows: int
    slots: int
    halvings: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolNeeds:
    """What the items of a run need of a pool."""

    slots: tuple[int, ...]  # of every item, costliest first
    row_bytes: int  # of a row in a step
    extra_slots: int = 0  # that are no item's own: a shared prefix
    step_rows: int | None = None  # of every step, however few items are inside; None: as many as there are


class PoolSizer:
    """`most_rows` and `most_slots` are the user's ceilings."""

    def __init__(
        self,
        needs: PoolNeeds,
        *,
        limit_bytes: int,
        resident_bytes: int,
        most_rows: int | None = None,
        most_slots: int | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._resident_bytes = resident_bytes
        self._row_bytes = max(needs.row_bytes, 1)
        self._extra_slots = needs.extra_slots
        self._most_slots = most_slots
        self._demand = [0, *itertools.accumulate(needs.slots)]  # slots of so many of the costliest
        free = max(limit_bytes - resident_bytes, 0)
        by_memory = int(POOL_ROWS_FRACTION * free / self._row_bytes)
        most = needs.step_rows or MOST_POOL_ROWS
        self.rows = max(min(len(needs.slots), most_rows or most, most, by_memory), 1)
        self._step_rows = needs.step_rows or self.rows
        self.failures = 0
        self._early = 0  # of the failures, those before anything was measured: they say nothing of the size
        self._halved = 0  # chunks, because reading took most of the room
        self._by_others = 0  # of the failures, those while other processes held the memory
        self._calm_readings, self._returns = 0, 0  # readings without others since then; how often room came back
        self.slot_bytes = 0  # 0: not measured yet
        self._fixed_bytes = resident_bytes  # at the peak, without slots

    @property
    def measured(self) -> bool:
        """Whether the bytes of slots and chunks are known."""
        return self.slot_bytes > 0

    @property
    def hopeless(self) -> bool:
        """Whether it has failed too often, or the costliest item does not fit."""
        return self.failures >= MOST_POOL_FAILURES or (self.measured and self.size.slots < self.least_slots)

    def refills(self, active: int) -> bool:
        """Whether prompts should be read now, with so many sequences under way."""
        return active <= POOL_REFILL_FRACTION * self.rows

    @property
    def least_slots(self) -> int:
        """Slots without which the costliest item has no place."""
        return self._extra_slots + self._demand[min(1, len(self._demand) - 1)]

    def first_size(self, slots: int) -> PoolSize:
        """A pool with room for the first chunk, which shows what it needs."""
        slots = max(min(slots, self._wanted_slots()), self.least_slots)
        return PoolSize(rows=self.rows, slots=slots, halvings=self.halvings)

    def record(self, *, slots: int, slot_bytes: int, peak_bytes: int) -> None:
        """A chunk was read in a pool of so many slots: what it took at its peak, weights and slots included."""
        self.slot_bytes = max(slot_bytes, 1)
        self._fixed_bytes = max(peak_bytes - slots * slot_bytes, self._resident_bytes)

    def record_failure(self, left_bytes: int | None = None) -> None:
        """It ran out of memory; `left_bytes` is what other processes leave of the device, if that is known."""
        others = left_bytes is not None and left_bytes < self._limit_bytes
        self.failures += 1
        self._by_others += others
        self._early += not self.measured and not others

    @property
    def halvings(self) -> int:
        """How often chunks were halved: after each failure, and where they left too little."""
        return self.failures + self._halved

    @property
    def crowded(self) -> bool:
        """Whether reading leaves too little for keys and values, and might leave more with smaller chunks."""
        if not self.measured or self.halvings >= MOST_CHUNK_HALVINGS or self.size.slots >= self._wanted_slots():
            return False
        reading = self._fixed_bytes - self._resident_bytes
        return reading > POOL_READING_FRACTION * (self._usable_bytes - self._resident_bytes)

    def halve_chunks(self) -> None:
        """Read in smaller chunks, and measure them."""
        self._halved += 1
        self.slot_bytes = 0

    @property
    def disturbed(self) -> bool:
        """Whether it is smaller because of other processes."""
        return self._by_others > 0

    def return_after_others(self, left_bytes: int | None) -> bool:
        """Whether the memory that others took is there again: failures because of them no longer count.

        After the first time it takes more than one reading, doubled each time: others may come and go for ever.
        """
        self._calm_readings = self._calm_readings + 1 if (left_bytes or 0) >= self._limit_bytes else 0
        if not self.disturbed or self._calm_readings < min(2**self._returns, MOST_CALM_READINGS):
            return False
        self.failures -= self._by_others
        self._by_others, self._calm_readings, self._returns = 0, 0, self._returns + 1
        return True

    @property
    def size(self) -> PoolSize:
        """What fits, and is wanted."""
        free = self._usable_bytes - self._fixed_bytes - self._step_rows * self._row_bytes
        fitting = max(int(free / max(self.slot_bytes, 1)), 0)
        return PoolSize(rows=self.rows, slots=min(fitting, self._wanted_slots()), halvings=self.halvings)

    @property
    def _usable_bytes(self) -> float:
        """The weights, and a part of the room beside them: a failure leaves less of that, however little it is."""
        room = POOL_LIMIT_FRACTION * self._limit_bytes - self._resident_bytes
        return self._resident_bytes + POOL_AFTER_FAILURE ** (self.failures - self._early) * room

    def _wanted_slots(self) -> int:
        """For as many of the costliest as there are rows, within the user's ceiling."""
        wanted = self._extra_slots + self._demand[self.rows]
        return wanted if self._most_slots is None else min(wanted, max(self._most_slots, self.least_slots))


def start_pool(
    needs: PoolNeeds, *, limit_bytes: int, resident_bytes: int, most_rows: int | None, most_slots: int | None
) -> PoolSizer:
    """The sizer of a run's pool."""
    return PoolSizer(
        needs, limit_bytes=limit_bytes, resident_bytes=resident_bytes, most_rows=most_rows, most_slots=most_slots
    )
