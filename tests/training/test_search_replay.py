"""The search for a micro-batch's size, played on curves that were measured: a few seconds must do.

Rates are samples per second of forward and backward on an NVIDIA H200 (docs/measurements/sweep.md), bytes a line
through what was reserved there. The allocator is one that caches: until it gives back, it holds what the largest took.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.replay_curves import video_curves
from brim.memory.devices import MemoryReading
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from tests.trials import micro_ran

GIB = 2**30
WINDOW = 128
COLD = 1.6  # times as long: the first at its size, while the allocator asks the driver for more
BUSY_SECONDS = 2.5  # at first, while the host has other work: up to 15 % longer, or by the length of a pause
SEARCH_SECONDS = 15  # at the best rate, at most, until the size is settled
MODELS = ("r3d_18", "mvit_v1_b", "mvit_v2_s", "swin3d_b", "swin3d_s", "swin3d_t")


@pytest.fixture
def curve_of() -> Callable[[str, int], Any]:
    """The curve of a model under a limit, as benchmarks have it."""
    return lambda model, limit: next(one for one in video_curves(limit) if one.name.startswith(f"{model} "))


def play(sizes: MicroBatchSizer, curve: Any, *, windows: int, noise: random.Random, window: int = WINDOW) -> int:
    """Train for so many windows; samples until the size was settled."""
    cached = seen = settled_after = 0
    clock = 0.0
    for _ in range(windows):
        sizes.begin_window()
        left = window
        while left:
            cached = 0 if sizes.new else cached
            length = sizes.next_length(left)
            cold, cached = length > cached, max(cached, length)
            assert curve.fits(cached), f"{length} does not fit"
            seconds = None
            if not sizes.settled:
                seconds = length / curve.rate(length) * (1 + abs(noise.gauss(0, 0.01)))
                seconds *= COLD if cold else 1.0
                if clock < BUSY_SECONDS:
                    seconds *= noise.uniform(1.0, 1.15)
                    seconds += 0.2 if noise.random() < 0.25 else 0.0
                clock += seconds
            micro_ran(sizes, length, length, seconds, MemoryReading(peak_reserved_bytes=curve.bytes_at(cached)))
            left, seen = left - length, seen + length
            if sizes.settled and not settled_after:
                settled_after = seen
        sizes.end_window()
    assert sizes.settled
    return settled_after


@pytest.mark.parametrize("window", [64, 128, 512])
@pytest.mark.parametrize("limit_gib", [24, 136])
@pytest.mark.parametrize("model", MODELS)
def test_the_size_is_found_within_seconds_and_is_nearly_as_fast_as_any(
    curve_of: Callable[[str, int], Any], model: str, limit_gib: int, window: int
) -> None:
    limit = limit_gib * GIB
    curve = curve_of(model, limit)
    best = max(curve.rate(size) for size in range(1, window + 1) if curve.fits(size))
    for seed in range(10):
        sizes = MicroBatchSizer(MicroBatchRequest(ceiling=None, limit_bytes=limit, largest=window))
        settled_after = play(sizes, curve, windows=30, noise=random.Random(seed), window=window)
        assert curve.rate(sizes.live.kept) >= 0.95 * best
        assert settled_after <= SEARCH_SECONDS * best
