"""What is known about where to start: the cap and the bytes of runs under other knobs, or a forecast's. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from brim.forecasting.byte_model import ByteModel
from brim.records import Probe

__all__ = ["ForecastBytes", "Hint"]

LIKELY = 0.75  # of the free bytes to fill at first: it is a guess, and rising from it costs nothing
STEEPEST = 2.0  # bytes of an item grow at most with the square of its cost
USUAL = 1.5  # growth to expect at least: a part that grows with the square shows only once it is large
BELOW_LIMIT = 0.9  # of a size that met a limit
FAR = 1.5  # items that cost this many times those known are too far away for what was found to be carried over to them
# Of the free bytes that a first batch should take by a forecast. Compute and memory of a card go together, so that this
# is near where larger batches stop being faster; it leaves a forecast room to be wrong, and the climb two steps.
FIRST_SHARE = 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastBytes:
    """Reserved bytes of batches that repeat one sample, forecast at a few numbers of it.

    bytes_ = ForecastBytes(item_cost=612, points=((2, 440 * 2**20), (8, 542 * 2**20), (512, 8682 * 2**20)))
    bytes_.largest_within(4 * 2**30)    # samples
    """

    item_cost: int  # of that sample
    points: tuple[tuple[int, int], ...]  # samples and bytes, at least one

    @property
    def grows(self) -> bool:
        """Whether the bytes depend on the number at all; those of a tiny model lie in the allocator's first segment."""
        return self.points[-1][1] > self.points[0][1]

    def largest_within(self, limit_bytes: int) -> int:
        """How many of the sample a batch may hold; 0 where not even one fits."""
        within = self._model().largest_within(limit_bytes)
        if within is None:  # the same bytes at every number: all fit, or none
            most, most_bytes = self.points[-1]
            return most if most_bytes <= limit_bytes else 0
        return within

    def bytes_at_cost(self, cost: int) -> int:
        """The bytes of a batch of this padded cost."""
        expected = self._model().bytes_at(math.ceil(cost / self.item_cost))
        assert expected is not None
        return expected

    def _model(self) -> ByteModel:
        model = ByteModel(noise=0.01)  # the allocator's blocks fall differently into segments at every size
        for size, size_bytes in self.points:
            model.observe(size, size_bytes)
        return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint:
    """Known before a run that has no plan of its own: similar runs' cap and batches, a forecast, or a rule of thumb."""

    cost_cap: int | None = None  # in padded cost, where the last similar run settled
    trials: tuple[Probe, ...] = ()  # batches of similar runs: bytes by items and cost
    scale: float = 1.0  # of the ceiling, for a first guess without any of these
    forecast: ForecastBytes | None = None  # of this run's own dearest sample

    @property
    def cost_limit(self) -> int | None:
        """What a batch may weigh by the size limits that similar runs have met; None: they met none.

        A kernel that takes so many tokens takes no more of them under another knob. What failed was some way above.
        """
        failed = [trial.cost for trial in self.trials if trial.verdict == "size_limit" and trial.cost]
        return max(math.floor(BELOW_LIMIT * min(failed)), 1) if failed else None

    def is_compared_near(self, item_cost: int) -> bool:
        """Whether a similar run has compared sizes to the end, of items that cost about as much.

        Where larger batches stop to pay is a matter of tokens at once: it hardly moves with the length of an item.
        """
        last = compared = None
        for trial in self.trials:
            if trial.fits and trial.cost and trial.detail == "comparing":
                last = trial.cost / trial.batch_size
            elif trial.detail == "settled" and last is not None:
                compared = last
        return compared is not None and 1 / FAR <= item_cost / compared <= FAR

    def knows_bytes_near(self, item_cost: int) -> bool:
        """Whether the batches of similar runs were of items about as dear as this, or dearer."""
        return any(item_cost <= FAR * cost for cost in bytes_by_item_cost(self.trials, 0))

    def fitting_items(self, limit_bytes: int, *, resident_bytes: int, item_cost: int) -> int | None:
        """How many items of this cost should fit, by a forecast or carried over from other costs; None without."""
        free = max(limit_bytes - resident_bytes, 0)
        if self.forecast is not None:
            fitting = self.forecast.largest_within(math.floor(resident_bytes + LIKELY * free))
            return min([max(fitting, 1), *_below_failures(self.trials, item_cost)])
        known = bytes_by_item_cost(self.trials, resident_bytes)
        if not known:
            return None
        nearest = min(known, key=lambda cost: abs(math.log(cost / item_cost)))
        # Towards dearer items as the known ones have grown; towards cheaper ones in proportion, which says too much.
        growth = _growth(known) if item_cost > nearest else 1.0
        expected = known[nearest] * (item_cost / nearest) ** growth
        fitting = max(int(LIKELY * free / expected), 1)
        return min([fitting, *_below_failures(self.trials, item_cost)])

    def first_items(self, limit_bytes: int, *, resident_bytes: int, item_cost: int, usual: int) -> int:
        """How many items the first batch of a climb should hold: `usual` without a forecast, or where that fits."""
        if self.forecast is None:
            return usual
        share = math.floor(resident_bytes + FIRST_SHARE * max(limit_bytes - resident_bytes, 0))
        fitting = self.fitting_items(limit_bytes, resident_bytes=resident_bytes, item_cost=item_cost) or 1
        return max(self.forecast.largest_within(share), min(usual, fitting))


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
