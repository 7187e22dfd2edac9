"""Windows: which samples an optimizer step learns from. How they are cut to fit is decided in sizing/. Pure.

A window is a stretch of the epoch's order, as long as the effective batch. Of every stretch a rank has each `ranks`-th
place, so that its share does not depend on where windows begin. A micro-batch is what is on the device at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Window", "epoch_order", "epoch_permutation", "next_window"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The places [start, stop) of an epoch's order: one optimizer step over all ranks."""

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many samples all ranks have together."""
        return self.stop - self.start

    def share(self, order: Sequence[int], *, rank: int, ranks: int) -> list[int]:
        """The samples of one rank; shares differ by one at most."""
        first = self.start + (rank - self.start) % ranks
        return [int(order[place]) for place in range(first, self.stop, ranks)]


def epoch_order(count: int, *, seed: int, epoch: int) -> list[int]:
    """Every sample once, in an order that seed and epoch decide alone: a resumed run finds it again."""
    order: list[int] = epoch_permutation(count, seed=seed, epoch=epoch).tolist()
    return order


def epoch_permutation(count: int, *, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same order as an array, [samples]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def next_window(position: int, count: int, effective_batch: int, *, smallest: int = 1) -> Window:
    """The window that begins at a place; what would be left too small for a window of its own goes with it."""
    stop = min(position + effective_batch, count)
    return Window(start=position, stop=count if count - stop < smallest else stop)
