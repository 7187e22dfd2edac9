"""What runs under other knobs say about where to start: their cap, and their bytes by what an item costs. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from brim.records import Probe

__all__ = ["Hint"]

LIKELY = 0.75  # of the free bytes to fill at first: it is a guess, and rising from it costs nothing
STEEPEST = 2.0  # bytes of an item grow at most with the square of its cost
USUAL = 1.5  # growth to expect at least: a part that grows with the square shows only once it is large


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint:
    """Known before a run that has no plan of its own: similar runs' cap and batches, or a rule of thumb."""

    cost_cap: int | None = None  # in padded cost, where the last similar run settled
    trials: tuple[Probe, ...] = ()  # batches of similar runs: bytes by items and cost
    scale: float = 1.0  # of the ceiling, for a first guess without any of these

    def fitting_items(self, limit_bytes: int, *, resident_bytes: int, item_cost: int) -> int | None:
        """How many items of this cost should fit, carried over from items of other costs; None without bytes."""
        known = bytes_by_item_cost(self.trials, resident_bytes)
        if not known:
            return None
        nearest = min(known, key=lambda cost: abs(math.log(cost / item_cost)))
        # Towards dearer items as the known ones have grown; towards cheaper ones in proportion, which says too much.
        growth = _growth(known) if item_cost > nearest else 1.0
        expected = known[nearest] * (item_cost / nearest) ** growth
        fitting: int = max(math.floor(LIKELY * max(limit_bytes - resident_bytes, 0) / expected), 1)
        return min([fitting, *_below_failures(self.trials, item_cost)])


def bytes_by_item_cost(trials: Iterable[Probe], resident_bytes: int) -> dict[float, float]:
    """Bytes that one item of a batch took, by the cost of an item, from the larger batches at each cost."""
    found: dict[float, tuple[int, float]] = {}
    for trial in trials:
        peak = trial.peak_allocated_bytes or trial.peak_reserved_bytes
        if not trial.fits or not trial.cost or not peak:
            continue
        cost, each = trial.cost / trial.batch_size, max(peak - resident_bytes, 1) / trial.batch_size
        if trial.batch_size >= found.get(cost, (0, 0.0))[0]:
            found[cost] = (trial.batch_size, each)
    return {cost: each for cost, (_, each) in found.items()}


def _growth(known: dict[float, float]) -> float:
    """The power of its cost that an item's bytes grow with, from the two dearest that are known."""
    if len(known) < 2:
        return USUAL
    low, high = sorted(known)[-2:]
    return float(min(max(math.log(known[high] / known[low]) / math.log(high / low), USUAL), STEEPEST))


def _below_failures(trials: Iterable[Probe], item_cost: int) -> list[int]:
    """Fewer items than failed at this cost or a smaller one."""
    return [
        max(trial.batch_size - 1, 1)
        for trial in trials
        if trial.verdict == "oom" and trial.cost and trial.cost / trial.batch_size <= item_cost
    ]
