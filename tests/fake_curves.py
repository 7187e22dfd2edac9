"""Synthetic cost curves, and probes that answer from them instead of from a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from random import Random

from hypothesis import strategies as st

from brim.records import Probe, Verdict
from brim.settings.find_settings import SearchSettings
from brim.sizing.priors import ForecastCurve
from brim.sizing.probing import ProbeContext, SearchResult, SizeSearch

BOUND = 4096  # the bound of the promise: below it the largest size is exact


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bytes of a step as a function of size, and the memory limit it runs under."""

    bytes_at: Callable[[int], int]
    limit: int
    base: int = 0
    label: str = ""

    def __repr__(self) -> str:
        return f"{self.label} limit={self.limit} base={self.base}"

    def largest(self, bound: int = BOUND) -> int:
        """The true largest size that fits, by bisection; 0 when none does."""
        low, high = 0, bound + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= self.limit else (low, middle)
        return low


@dataclasses.dataclass
class FakeDevice:
    """Answers probes from a curve and a step time, and remembers what was asked."""

    curve: Curve
    step_seconds: Callable[[int], float] = lambda size: 0.01 + 0.001 * size
    verdicts: dict[int, Verdict] = dataclasses.field(default_factory=dict)  # verdicts forced from this size on
    thrashes_from: float = math.inf  # the fraction of the limit above which a size thrashes
    asked: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, size: int) -> Probe:
        self.asked.append(size)
        used = self.curve.bytes_at(size)
        forced = [verdict for start, verdict in sorted(self.verdicts.items()) if size >= start]
        if forced:
            return Probe(batch_size=size, verdict=forced[-1], detail=f"forced {forced[-1]}")
        if used > self.curve.limit:
            return Probe(batch_size=size, verdict="oom", needed_bytes=used, detail="out of memory")
        seconds = self.step_seconds(size)
        return Probe(
            batch_size=size,
            verdict="thrashes" if used > self.thrashes_from * self.curve.limit else "fits",
            peak_allocated_bytes=used,
            peak_reserved_bytes=used,
            step_seconds=seconds,
            samples_per_second=size / seconds,
            steps=3,
        )

    @property
    def ooms(self) -> int:
        return sum(self.curve.bytes_at(size) > self.curve.limit for size in self.asked)


def searched(
    context: ProbeContext,
    settings: SearchSettings,
    probe: Callable[[int], Probe],
    forecast: ForecastCurve | None = None,
) -> SearchResult:
    """Drive a search to its end; what `probe` raises is the workload's own."""
    search = SizeSearch(context, settings, forecast)
    while search.found is None:
        try:
            outcome: Probe | Exception = probe(search.next_size())
        except Exception as error:
            outcome = error
        search.record(outcome)
    return search.found


def context_of(curve: Curve, **changes: object) -> ProbeContext:
    """The context of a device that counts bytes exactly, as the CPU's meter does."""
    context = ProbeContext(
        device="fake",
        mode="train",
        unit="samples",
        smallest_size=1,
        largest_size=None,
        limit_bytes=curve.limit,
        base_bytes=curve.base,
        reserved_bytes=0,
        exact=True,
        used_by_others_bytes=0,
        identity=None,
        environment={},
    )
    return dataclasses.replace(context, **changes)


def _limit_for(draw: st.DrawFn, bytes_at: Callable[[int], int], largest: int) -> int:
    """A limit at which `largest` is the true answer: anywhere from its own bytes to just below the next size's."""
    low, high = bytes_at(largest), bytes_at(largest + 1)
    return draw(st.integers(low, max(low, high - 1)))


@st.composite
def affine(draw: st.DrawFn, *, constant: st.SearchStrategy[int] | None = None) -> Curve:
    slope = draw(st.integers(1, 10**7))
    constant_bytes = draw(constant if constant is not None else st.integers(0, 10**9))
    base = draw(st.sampled_from([0, constant_bytes // 2, constant_bytes]))

    def bytes_at(size: int) -> int:
        return constant_bytes + slope * size

    limit = _limit_for(draw, bytes_at, draw(st.integers(1, BOUND - 1)))
    return Curve(bytes_at, limit, base, f"{constant_bytes} + {slope}·n")


def constant_dwarfs_slope() -> st.SearchStrategy[Curve]:
    return affine(constant=st.integers(10**11, 10**12))


@st.composite
def quadratic(draw: st.DrawFn) -> Curve:
    constant, slope = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**6))
    curvature = draw(st.integers(1, 10**4))
    base = draw(st.sampled_from([0, constant // 2, constant]))

    def bytes_at(size: int) -> int:
        return constant + slope * size + curvature * size * size

    limit = _limit_for(draw, bytes_at, draw(st.integers(1, BOUND - 1)))
    return Curve(bytes_at, limit, base, f"{constant} + {slope}·n + {curvature}·n²")


@st.composite
def kink(draw: st.DrawFn) -> Curve:
    """One slope up to a size, another beyond it: up (an algorithm that needs more) or down."""
    constant, at = draw(st.integers(0, 10**9)), draw(st.integers(2, BOUND))
    before, after = draw(st.integers(1, 10**6)), draw(st.integers(1, 10**6))

    def bytes_at(size: int) -> int:
        return constant + before * min(size, at) + after * max(size - at, 0)

    limit = _limit_for(draw, bytes_at, draw(st.integers(1, BOUND - 1)))
    return Curve(bytes_at, limit, constant, f"{constant} + {before}·n, from {at} on {after}·n")


@st.composite
def staircase(draw: st.DrawFn) -> Curve:
    tread, rise = draw(st.integers(2, 128)), draw(st.integers(1, 10**7))
    constant = draw(st.integers(0, 10**9))

    def bytes_at(size: int) -> int:
        return constant + rise * -(-size // tread)

    largest = draw(st.integers(1, BOUND - 1))
    stairs = -(-largest // tread)
    limit = draw(st.integers(constant + rise * stairs, constant + rise * (stairs + 1) - 1))
    return Curve(bytes_at, limit, constant, f"{constant} + {rise}·⌈n/{tread}⌉")


def random_curves(shape: str, *, count: int, seed: int = 7) -> Iterator[Curve]:
    """Curves whose slope changes up to eightfold, or with treads up to 128, at every scale; answers below the bound."""
    random = Random(seed)
    made = 0
    while made < count:
        constant, slope = int(10 ** random.uniform(1, 10)), int(10 ** random.uniform(0, 7)) + 1
        at, after = random.randint(2, 3_000), max(1, int(slope * 2 ** random.uniform(-3, 3)))
        tread = random.randint(2, 128)

        def bent(n: int, c: int = constant, s: int = slope, k: int = at, t: int = after) -> int:
            return c + s * min(n, k) + t * max(n - k, 0)

        def stairs(n: int, c: int = constant, s: int = slope, k: int = tread) -> int:
            return c + s * -(-n // k)

        bytes_at = stairs if shape == "staircase" else bent
        largest = random.randint(1, BOUND - 1)
        limit = bytes_at(largest)
        if bytes_at(BOUND) <= limit:
            continue
        made += 1
        yield Curve(bytes_at, limit, random.choice([0, constant, constant // 2]), f"{shape} {made}")
