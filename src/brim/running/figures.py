"""What a run of the executor came to, counted as it goes. Pure."""

from __future__ import annotations

import dataclasses

from brim.records import BatchSizes

__all__ = ["ExecutionFigures"]


@dataclasses.dataclass(kw_only=True)
class ExecutionFigures:
    """What a run came to, counted as it goes."""

    items: int = 0
    failed: int = 0
    batches: int = 0
    oom_events: int = 0
    seconds: float = 0.0  # inside the function, one batch after the other
    busy_seconds: float = 0.0  # of these, the device's own where they are known: without waiting for items
    cost: int = 0
    padded_cost: int = 0
    largest_padded_cost: int = 0  # of one batch, in the unit of the cap
    warm_up_seconds: float = 0.0  # of `busy_seconds`: the first batch, which loads kernels whatever its size
    warm_up_padded_cost: int = 0
    search_seconds: float = 0.0  # of `busy_seconds`: between the first batch and the size's settling
    search_padded_cost: int = 0
    best_search_rate: float = 0.0  # padded cost a second
    lost_seconds: float = 0.0  # in batches that failed, and in cleaning up after them
    batch_counts: list[int] = dataclasses.field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0

    @property
    def padding_fraction(self) -> float:
        """How much of what was computed was padding."""
        return 1 - self.cost / self.padded_cost if self.padded_cost else 0.0

    @property
    def planning_seconds(self) -> float:
        """What finding the size has cost: failed batches, and what those before it settled took more than later ones.

        Nothing else is lost, since every batch's results are kept. The first batch is not counted: it takes long at a
        size that was given as well.
        """
        settled_cost = self.padded_cost - self.search_padded_cost - self.warm_up_padded_cost
        settled = self.busy_seconds - self.search_seconds - self.warm_up_seconds
        rate = settled_cost / settled if settled_cost > 0 and settled > 0 else self.best_search_rate
        at_that_rate = self.search_padded_cost / rate if rate else self.search_seconds
        return self.lost_seconds + max(self.search_seconds - at_that_rate, 0.0)

    def batch_sizes(self) -> BatchSizes | None:
        """The sizes of the batches that ran, weighted by their items; None before the first."""
        return BatchSizes.of(self.batch_counts)
