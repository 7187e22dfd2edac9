"""The search for a micro-batch's size, played on curves that were measured: a few seconds must do.

Rates are samples per second of forward and backward on an NVIDIA H200 (docs/measurements/sweep.md), bytes a line
through what was reserved there. The allocator is one that caches: until it gives back, it holds what the largest took.
"""

from __future__ import annotations

import math
import random

import pytest

from brim.memory.devices import Reading
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from trials import micro_ran

GIB = 2**30
WINDOW = 128
RESIDENT_GIB = 0.4
COLD = 1.6  # times as long: the first at its size, while the allocator asks the driver for more
BUSY_SECONDS = 2.5  # at first, while the host has other work: up to 15 % longer, or by the length of a pause
SEARCH_SECONDS = 15  # at the best rate, at most, until the size is settled
CURVES: dict[str, tuple[float, dict[int, float]]] = {  # GiB a sample; samples per second by size
    "r3d_18": (0.115, {4: 307, 8: 459, 12: 491, 16: 503, 24: 518, 32: 528, 48: 551, 64: 561, 96: 566, 128: 569}),
    "mvit_v1_b": (1.43, {4: 50.8, 8: 81.5, 12: 95.0, 16: 98.6, 24: 102.6, 32: 104.3, 48: 108.6, 64: 110.5, 128: 111.9}),
    "mvit_v2_s": (1.40, {4: 28.4, 8: 44.2, 12: 51.1, 16: 57.1, 24: 61.9, 32: 63.8, 48: 67.8, 64: 69.3, 96: 69.9}),
    "swin3d_b": (3.20, {4: 32.0, 8: 59.3, 12: 65.3, 16: 66.8, 24: 69.1, 32: 70.5, 48: 72.5}),
    "swin3d_s": (2.40, {4: 42.2, 8: 72.7, 12: 80.3, 16: 86.4, 24: 89.5, 32: 91.6, 42: 94.7, 48: 95.5, 64: 96.8}),
    "swin3d_t": (1.75, {4: 63.3, 8: 123.8, 12: 135.5, 16: 140.0, 24: 145.2, 32: 147.9, 48: 153.1, 64: 155.3, 96: 157}),
}


def rate_at(curve: dict[int, float], size: int) -> float:
    """Between two sizes by the logarithm; below the first one a micro-batch takes as long as that."""
    known = sorted(curve)
    if size <= known[0]:
        return curve[known[0]] * size / known[0]
    if size >= known[-1]:
        return curve[known[-1]]
    above = next(place for place, other in enumerate(known) if other > size)
    low, high = known[above - 1], known[above]
    part = math.log(size / low) / math.log(high / low)
    return curve[low] + part * (curve[high] - curve[low])


def bytes_at(per_sample: float, size: int) -> int:
    return round((RESIDENT_GIB + per_sample * size) * GIB)


def play(
    sizes: MicroBatchSizer, model: str, *, windows: int, noise: random.Random, limit: int, window: int = WINDOW
) -> int:
    """Train for so many windows; samples until the size was settled."""
    per_sample, curve = CURVES[model]
    cached = seen = settled_after = 0
    clock = 0.0
    for _ in range(windows):
        sizes.begin_window()
        left = window
        while left:
            cached = 0 if sizes.new else cached
            length = sizes.next_length(left)
            cold, cached = length > cached, max(cached, length)
            assert bytes_at(per_sample, cached) <= limit, f"{length} does not fit"
            seconds = None
            if not sizes.settled:
                seconds = length / rate_at(curve, length) * (1 + abs(noise.gauss(0, 0.01)))
                seconds *= COLD if cold else 1.0
                if clock < BUSY_SECONDS:
                    seconds *= noise.uniform(1.0, 1.15)
                    seconds += 0.2 if noise.random() < 0.25 else 0.0
                clock += seconds
            micro_ran(sizes, length, length, seconds, Reading(peak_reserved_bytes=bytes_at(per_sample, cached)))
            left, seen = left - length, seen + length
            if sizes.settled and not settled_after:
                settled_after = seen
        sizes.end_window()
    assert sizes.settled
    return settled_after


@pytest.mark.parametrize("window", [64, 128, 512])
@pytest.mark.parametrize("limit_gib", [24, 136])
@pytest.mark.parametrize("model", CURVES)
def test_the_size_is_found_within_seconds_and_is_nearly_as_fast_as_any(model: str, limit_gib: int, window: int) -> None:
    limit = limit_gib * GIB
    per_sample, curve = CURVES[model]
    best = max(rate_at(curve, size) for size in range(1, window + 1) if bytes_at(per_sample, size) <= limit)
    for seed in range(10):
        sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, limit_bytes=limit, largest=window))
        settled_after = play(sizes, model, windows=30, noise=random.Random(seed), limit=limit, window=window)
        assert rate_at(curve, sizes.live.kept) >= 0.95 * best
        assert settled_after <= SEARCH_SECONDS * best
