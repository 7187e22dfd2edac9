"""The curves that replays run on: bytes and seconds of a step over its size, and the limit they run under. No torch.

Three sets: shapes and cards that the searches were made on (`tuned_*`), six video models as they were measured on an
H200, and forty random curves that were not used for tuning (`held_out_curves`): check those last, and change
nothing for one of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.search_curves import BOUND, SHAPES

__all__ = ["GIB", "Curve", "held_out_curves", "stored_curves", "tuned_cards", "tuned_shapes", "video_curves"]

GIB = 2**30
DATA = Path(__file__).parent / "data"
VIDEO_RESIDENT_GIB = 0.4
VIDEO_RATES: dict[str, tuple[float, dict[int, float]]] = {  # GiB a sample; samples per second of forward and backward
    "r3d_18": (0.115, {4: 307, 8: 459, 12: 491, 16: 503, 24: 518, 32: 528, 48: 551, 64: 561, 96: 566, 128: 569}),
    "mvit_v1_b": (1.43, {4: 50.8, 8: 81.5, 12: 95.0, 16: 98.6, 24: 102.6, 32: 104.3, 48: 108.6, 64: 110.5, 128: 111.9}),
    "mvit_v2_s": (1.40, {4: 28.4, 8: 44.2, 12: 51.1, 16: 57.1, 24: 61.9, 32: 63.8, 48: 67.8, 64: 69.3, 96: 69.9}),
    "swin3d_b": (3.20, {4: 32.0, 8: 59.3, 12: 65.3, 16: 66.8, 24: 69.1, 32: 70.5, 48: 72.5}),
    "swin3d_s": (2.40, {4: 42.2, 8: 72.7, 12: 80.3, 16: 86.4, 24: 89.5, 32: 91.6, 42: 94.7, 48: 95.5, 64: 96.8}),
    "swin3d_t": (1.75, {4: 63.3, 8: 123.8, 12: 135.5, 16: 140.0, 24: 145.2, 32: 147.9, 48: 153.1, 64: 155.3, 96: 157}),
}  # docs/measurements/sweep.md


@dataclasses.dataclass(frozen=True)
class Curve:
    """A modelled workload: what a step of n samples takes."""

    name: str
    bytes_at: Callable[[int], int]
    seconds_at: Callable[[int], float]
    limit: int
    base: int = 0  # bytes that are resident before a step
    noise: float = 0.0  # standard deviation of a time, as a part of it

    def fits(self, size: int) -> bool:
        return self.bytes_at(size) <= self.limit

    def largest(self, bound: int) -> int:
        """The largest size that fits, by bisection: bytes never fall with the size."""
        low, high = 0, bound + 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def rate(self, size: int) -> float:
        return size / self.seconds_at(size)

    def best_rate(self, bound: int) -> float:
        """The best rate of a size that fits: every size up to 512, then every hundredth part."""
        largest = self.largest(bound)
        sizes = [*range(1, min(largest, 512) + 1), largest]
        while sizes[-2] * 1.01 < largest:
            sizes.insert(-1, math.ceil(sizes[-2] * 1.01))
        return max(map(self.rate, sizes))

    def timed(self, size: int, draw: random.Random) -> float:
        """A time as it would be measured."""
        return self.seconds_at(size) * (1 + abs(draw.gauss(0, self.noise)))


def tuned_shapes(count: int = 25) -> Iterator[tuple[str, Curve]]:
    """Bytes alone, for the largest size: those of benchmarks/search_curves.py, by the name of their shape."""
    for shape in SHAPES:
        draw = random.Random(7)
        made = 0
        while made < count:
            bytes_at = shape(draw)
            limit = bytes_at(draw.randint(1, BOUND - 1))
            base = draw.choice([0, bytes_at(0), bytes_at(0) // 2])
            curve = Curve(f"{shape.__name__} {made}", bytes_at, lambda size: 0.01 * size, limit, base)
            if curve.largest(BOUND) < BOUND:
                made += 1
                yield shape.__name__.replace("_", " "), curve


def tuned_cards(count: int = 40) -> Iterator[Curve]:
    """Bytes in a line and a rate that saturates, as the tests of the search for the fastest have them."""
    for number in range(count):
        draw = random.Random(number)
        largest = draw.randint(2, 20_000)
        constant, slope = int(10 ** draw.uniform(6, 10)), int(10 ** draw.uniform(3, 8))
        item = 10 ** draw.uniform(-5, -2) * min(1, 400 / largest)
        fixed = item * min(10 ** draw.uniform(-2, 3.7), 4 / item)
        yield Curve(
            f"card {number}",
            lambda size, c=constant, s=slope: c + s * size,  # type: ignore[misc]
            lambda size, f=fixed, i=item: f + i * size,  # type: ignore[misc]
            constant + slope * largest,
            constant,
        )


def video_curves(limit: int) -> Iterator[Curve]:
    """Micro-batches of six video models under a limit."""
    for name, (per_sample, rates) in VIDEO_RATES.items():
        yield Curve(
            f"{name} at {limit // GIB} GiB",
            lambda size, each=per_sample: round((VIDEO_RESIDENT_GIB + each * size) * GIB),  # type: ignore[misc]
            lambda size, known=rates: size / _between(known, size),  # type: ignore[misc]
            limit,
            noise=0.01,
        )


def stored_curves(file: Path = DATA / "curves-h200.json") -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The environment, the limit and the curves of a file that benchmarks/find.py has filled."""
    stored = json.loads(file.read_text())
    ((limit, curves),) = stored["curves"].items()
    return stored["environments"][limit], limit, curves


def held_out_curves(count: int = 40) -> Iterator[Curve]:
    """Every kind of bytes with every kind of time, at scales of their own, some noisy."""
    for number in range(count):
        draw = random.Random(f"held out {number}")
        largest = int(math.exp(draw.uniform(math.log(4), math.log(4000))))
        bytes_kind, bytes_at, constant = _bytes(number % 4, largest, draw)
        time_kind, seconds_at = _seconds(number % 3, largest, draw)
        limit = bytes_at(largest) + draw.randrange(max(bytes_at(largest + 1) - bytes_at(largest), 1))
        noise = draw.choice([0.0, 0.01, 0.02])
        name = f"{number}: {bytes_kind}, {time_kind}, noise {noise:g}, largest {largest}"
        yield Curve(name, bytes_at, seconds_at, limit, draw.choice([0, constant]), noise)


def _bytes(kind: int, largest: int, draw: random.Random) -> tuple[str, Callable[[int], int], int]:
    constant, slope = int(10 ** draw.uniform(8, 10)), int(10 ** draw.uniform(6, 8.5))
    if kind == 0:
        return "affine", lambda size: constant + slope * size, constant
    if kind == 1:
        curved = int(slope / largest * 10 ** draw.uniform(-1, 1)) + 1
        return "quadratic", lambda size: constant + slope * size + curved * size * size, constant
    if kind == 2:
        tread, rise = draw.randint(2, 64), slope * draw.randint(1, 16)
        return "stairs", lambda size: constant + slope * size + rise * -(-size // tread), constant
    at, after = draw.randint(2, 2 * largest), int(slope * 2 ** draw.uniform(-2, 2)) + 1
    return "kinked", lambda size: constant + slope * min(size, at) + after * max(size - at, 0), constant


def _seconds(kind: int, largest: int, draw: random.Random) -> tuple[str, Callable[[int], float]]:
    item = draw.uniform(0.05, 3.0) / largest
    fixed = item * math.exp(draw.uniform(math.log(0.3), math.log(2.0 * largest)))
    if kind == 0:
        return "saturates", lambda size: fixed + item * size
    if kind == 1:
        at, slower = draw.randint(2, largest), draw.uniform(1.1, 1.5)
        return f"slower from {at}", lambda size: fixed + item * (size if size < at else slower * size)
    wave = draw.randint(2, max(largest // 3, 3))
    return f"in waves of {wave}", lambda size: fixed + item * wave * -(-size // wave)


def _between(known: dict[int, float], size: int) -> float:
    """A rate by the logarithm of the size; below the first one a micro-batch takes as long as that."""
    sizes = sorted(known)
    if size <= sizes[0]:
        return known[sizes[0]] * size / sizes[0]
    if size >= sizes[-1]:
        return known[sizes[-1]]
    high = next(place for place, other in enumerate(sizes) if other > size)
    part = math.log(size / sizes[high - 1]) / math.log(sizes[high] / sizes[high - 1])
    return known[sizes[high - 1]] + part * (known[sizes[high]] - known[sizes[high - 1]])
