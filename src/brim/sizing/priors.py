"""What is known before the first batch, and the live sizer that starts from it.

A plan of the same work, batches of similar runs (another value of a knob), a forecast, or a rule of thumb: the first of
these that says anything decides where a run starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brim.records import Plan, Probe
from brim.sizing.byte_model import ByteModel
from brim.sizing.constants import (
    ALLOCATOR_NOISE,
    BELOW_SIZE_LIMIT,
    FASTEST_FLOPS,
    FEWEST_BATCHES,
    FIRST_ITEMS,
    FIRST_LIMIT_FRACTION,
    LEAP_FACTOR,
    LONG_RUN_SECONDS,
    MAX_CARRIED_COST_RATIO,
    MAX_FORECAST_ERROR,
    MOST_SPARED_BATCHES,
    NEIGHBOUR_LIMIT_FRACTION,
    POSITIONS_OF_A_SAMPLE,
    SHORT_RUN_SAMPLES,
    STEEPEST_ITEM_GROWTH,
    TRACE_DECODE_STEPS,
    TRACED_SAMPLES,
    USUAL_ITEM_GROWTH,
)
from brim.sizing.live import LiveSizer

__all__ = [
    "AvailableMemory",
    "ForecastBytes",
    "ForecastCurve",
    "LiveRequest",
    "NeighbourPriors",
    "Prior",
    "forecast_pays",
    "largest_worth_finding",
    "start_live",
]

MAX_PRIOR_TRIALS = 64  # batches of earlier runs that a guess is made from


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastCurve:
    """A forecast as functions of the number of samples."""

    reserved_at: Callable[[int], int]  # peak bytes where there is memory for all that the allocator keeps
    allocated_at: Callable[[int], int]  # peak bytes in use
    runs_within: Callable[[int, int], bool]  # whether a size runs under a limit, which makes the allocator keep less


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastBytes:
    """Reserved bytes of batches that repeat one sample, forecast at a few numbers of it.

    bytes_ = ForecastBytes(item_cost=612, points=((2, 440 * 2**20), (8, 542 * 2**20), (512, 8682 * 2**20)))
    bytes_.largest_within(4 * 2**30)    # samples
    """

    item_cost: int  # of that sample
    points: tuple[tuple[int, int], ...]  # samples and bytes, at least one

    @classmethod
    def of_curve(cls, curve: ForecastCurve, *, item_cost: int, limit_bytes: int, most: int) -> ForecastBytes:
        """At two small sizes, and where a line through them meets the limit, or at the largest there is.

        Small sizes lie in the allocator's first segments and say little about the slope.
        """
        found = {size: curve.reserved_at(size) for size in TRACED_SAMPLES}
        (low, low_bytes), (high, high_bytes) = found.items()
        slope = (high_bytes - low_bytes) / (high - low)
        reach = most if slope <= 0 else high + (limit_bytes - high_bytes) / slope
        far = max(math.floor(min(reach, most)), high)
        points = tuple({**found, far: curve.reserved_at(far)}.items())
        return cls(item_cost=item_cost, points=points)

    @property
    def grows(self) -> bool:
        """Whether the bytes depend on the number at all; those of a tiny model lie in the allocator's first segment."""
        return self.points[-1][1] > self.points[0][1]

    def largest_within(self, limit_bytes: int) -> int:
        """How many of the sample a batch may hold; 0 where not even one fits."""
        within = self._curve().largest_within(limit_bytes)
        if within is None:  # the same bytes at every number: all fit, or none
            most, most_bytes = self.points[-1]
            return most if most_bytes <= limit_bytes else 0
        return within

    def bytes_at_cost(self, cost: int) -> int:
        """The bytes of a batch of this padded cost."""
        expected = self._curve().bytes_at(math.ceil(cost / self.item_cost))
        assert expected is not None
        return expected

    def _curve(self) -> ByteModel:
        curve = ByteModel(noise=ALLOCATOR_NOISE)
        for size, size_bytes in self.points:
            curve.observe(size, size_bytes)
        return curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """The memory that batches may have, and the cost of the costliest item that they will hold."""

    limit_bytes: int | None
    resident_bytes: int = 0  # whatever the batch: the weights
    item_cost: int = 1

    @property
    def free_bytes(self) -> int:
        """What is left beside the weights."""
        return max((self.limit_bytes or 0) - self.resident_bytes, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """Known before a run's first batch."""

    known_size: int | None = None  # a plan of the same work
    likely_size: int | None = None  # in padded cost, where the last similar run settled
    trials: tuple[Probe, ...] = ()  # batches of similar runs: bytes by items and cost
    ceiling_share: float = 1.0  # of a ceiling in samples: a rule of thumb for a first guess without any of these
    forecast: ForecastBytes | None = None  # of this run's own costliest sample

    @property
    def cost_limit(self) -> int | None:
        """What a batch may cost by the size limits that similar runs have met; None: they met none.

        A kernel that takes so many tokens takes no more of them under another knob. What failed was some way above.
        """
        failed = [trial.cost for trial in self.trials if trial.verdict == "size_limit" and trial.cost]
        return max(math.floor(BELOW_SIZE_LIMIT * min(failed)), 1) if failed else None

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
        if compared is None:
            return False
        return 1 / MAX_CARRIED_COST_RATIO <= item_cost / compared <= MAX_CARRIED_COST_RATIO

    def knows_bytes_near(self, item_cost: int) -> bool:
        """Whether the batches of similar runs were of items that cost about as much as this, or more."""
        return any(item_cost <= MAX_CARRIED_COST_RATIO * cost for cost in _bytes_by_item_cost(self.trials, 0))

    def fitting_items(self, memory: AvailableMemory) -> int | None:
        """How many of the costliest items should fit, by a forecast or by other costs; None without."""
        if self.forecast is not None:
            usable = math.floor(memory.resident_bytes + NEIGHBOUR_LIMIT_FRACTION * memory.free_bytes)
            fitting = self.forecast.largest_within(usable)
            return min([max(fitting, 1), *_below_failures(self.trials, memory.item_cost)])
        known = _bytes_by_item_cost(self.trials, memory.resident_bytes)
        if not known:
            return None
        nearest = min(known, key=lambda cost: abs(math.log(cost / memory.item_cost)))
        # Towards costlier items as the known ones have grown; towards cheaper ones in proportion, which says too much.
        growth = _growth(known) if memory.item_cost > nearest else 1.0
        expected = known[nearest] * (memory.item_cost / nearest) ** growth
        fitting = max(int(NEIGHBOUR_LIMIT_FRACTION * memory.free_bytes / expected), 1)
        return min([fitting, *_below_failures(self.trials, memory.item_cost)])

    def first_items(self, memory: AvailableMemory) -> int:
        """How many items the first batch of a climb should hold: two without a forecast, or where that fits."""
        if self.forecast is None:
            return FIRST_ITEMS
        share = math.floor(memory.resident_bytes + FIRST_LIMIT_FRACTION * memory.free_bytes)
        return max(self.forecast.largest_within(share), min(FIRST_ITEMS, self.fitting_items(memory) or 1))

    def first_under(self, ceiling: int, memory: AvailableMemory) -> int:
        """Where to start under a ceiling in samples: what fits by the bytes of similar runs, or the rule of thumb."""
        fitting = self.fitting_items(memory)
        if fitting is None:
            return max(round(self.ceiling_share * ceiling), 1)
        return min(fitting, ceiling)


class NeighbourPriors:
    """What the values of a knob so far have taught the next one. A point is the value of every knob."""

    def __init__(self) -> None:
        self._prior = Prior()
        self._learned_at: Mapping[str, Any] | None = None

    def prior_for(self, point: Mapping[str, Any], *, ceiling_share: float = 1.0) -> Prior:
        """What to start a run at this point from."""
        known = self._prior if self._comparable(point) else Prior()
        return dataclasses.replace(known, ceiling_share=ceiling_share)

    def learn(self, point: Mapping[str, Any], plan: Plan | None) -> None:
        """Keep where the run at this point settled."""
        if plan is None or not plan.probes:
            return
        before = self._prior.trials if self._comparable(point) else ()
        likely = plan.size if plan.unit == "tokens" else None
        self._prior = Prior(likely_size=likely, trials=(*before, *plan.probes)[-MAX_PRIOR_TRIALS:])
        self._learned_at = point

    def _comparable(self, point: Mapping[str, Any]) -> bool:
        """Whether the points differ in numbers only: bytes under another precision, say, are no guide."""
        if self._learned_at is None:
            return False
        return _not_numbers(self._learned_at) == _not_numbers(point)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveRequest:
    """What is asked of the batches of a run: a size in samples or padded cost, or neither, and it is found."""

    batch_size: int | None = None  # samples at most
    cost_cap: int | None = None  # padded cost at most
    fixed: bool = False  # exactly `batch_size`
    ceiling: int | None = None  # of a size that is found


def start_live(asked: LiveRequest, prior: Prior, memory: AvailableMemory) -> LiveSizer:
    """The sizer of a run: at the size asked for, at that of a plan, or where a climb begins."""
    limit_bytes = memory.limit_bytes
    if asked.batch_size is not None:
        first = asked.batch_size if asked.fixed else prior.first_under(asked.batch_size, memory)
        return LiveSizer(first=first, ceiling=asked.batch_size, grows=False, limit_bytes=limit_bytes)
    if asked.cost_cap is not None:
        return LiveSizer(first=asked.cost_cap, ceiling=asked.cost_cap, grows=False, limit_bytes=limit_bytes)
    if prior.known_size is not None:
        return LiveSizer(first=prior.known_size, known=True, limit_bytes=limit_bytes)
    if prior.likely_size is None:
        first = prior.first_items(memory) * memory.item_cost
    else:
        fitting = prior.fitting_items(memory)
        likely = prior.likely_size if fitting is None else min(prior.likely_size, fitting * memory.item_cost)
        first = max(likely, memory.item_cost)
    bounds = [bound for bound in (asked.ceiling, prior.cost_limit) if bound is not None]
    sizer = LiveSizer(
        first=first,
        ceiling=min(bounds, default=None),
        known=prior.likely_size is not None and prior.is_compared_near(memory.item_cost),
        likely=prior.likely_size is not None,
        limit_bytes=limit_bytes,
    )
    sizer.evidence.bytes.base_bytes = memory.resident_bytes
    if prior.forecast is not None and prior.forecast.grows:
        sizer.evidence.bytes.expect(
            prior.forecast.bytes_at_cost, base_bytes=memory.resident_bytes, most_off=MAX_FORECAST_ERROR
        )
    return sizer


def _not_numbers(point: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in point.items() if isinstance(value, str)}


def forecast_pays(costs: Sequence[int], *, new_tokens: int | None, counts_tokens: bool, parameters: int) -> bool:
    """Whether a trace spares a run more than it takes, or is lost in the length of the run.

    What a forecast spares is the small batches of a climb. Generation pays for each with as many steps as there are new
    tokens (`new_tokens`), whatever its size; a forward over two samples takes no time at all, and then a forecast is
    only good for knowing beforehand what fits.
    """
    if not costs:
        return False
    if new_tokens is not None:
        climbed = max(sum(costs) / max(costs) / SHORT_RUN_SAMPLES, 1)
        if min(math.log(climbed, LEAP_FACTOR), MOST_SPARED_BATCHES) * new_tokens >= 2 * TRACE_DECODE_STEPS:
            return True
    positions = sum(costs) if counts_tokens else POSITIONS_OF_A_SAMPLE * len(costs)
    return 2 * parameters * positions / FASTEST_FLOPS >= LONG_RUN_SECONDS


def largest_worth_finding(costs: Sequence[int]) -> int:
    """The largest size that still leaves a few batches: a larger one has no time to pay for what finding it costs."""
    return max(sum(costs) // FEWEST_BATCHES, FIRST_ITEMS * max(costs, default=1))


def _bytes_by_item_cost(trials: Iterable[Probe], resident_bytes: int) -> dict[float, float]:
    """Bytes that one item of a batch used, by the cost of an item, from the larger batches at each cost."""
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
    """The power of its cost that an item's bytes grow with, from the two costliest that are known."""
    if len(known) < 2:
        return USUAL_ITEM_GROWTH
    low, high = sorted(known)[-2:]
    measured = math.log(known[high] / known[low]) / math.log(high / low)
    return float(min(max(measured, USUAL_ITEM_GROWTH), STEEPEST_ITEM_GROWTH))


def _below_failures(trials: Iterable[Probe], item_cost: int) -> list[int]:
    """Fewer items than failed at this cost or a smaller one."""
    return [
        max(trial.batch_size - 1, 1)
        for trial in trials
        if trial.verdict == "oom" and trial.cost and trial.cost / trial.batch_size <= item_cost
    ]
