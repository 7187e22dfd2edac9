"""From two or three traced sizes to any size: each request's bytes as a function of the size, then the allocator again.

Peaks of reserved memory do not lie on a line: they jump with every size, because blocks fall differently into
segments. What does lie on a line, or a parabola where the workload has one, is the bytes of every single request. So a
size that was not traced gets a timeline of its own, request by request, and its own replay. Only where the traces do
not match each other, request for request, are their peaks themselves fitted, with a note.

Pure Python: no torch, no device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from brim.forecasting.allocator import FREE, AllocatorSettings, CachingAllocator, Replay, make_allocator, replay
from brim.forecasting.events import OUTSIDE
from brim.forecasting.overheads import PARTS, AllocatorTimeline
from brim.sizing.byte_model import ByteModel

__all__ = ["Owned", "Peaks", "SizeModel"]

Owned = dict[tuple[str, str], int]  # bytes by module and part

KEPT_PARTS = ("weights", "optimizer_state", "workspaces")  # these outlive a step
STILL_PARTS = ("weights", "gradients", "optimizer_state", "workspaces")  # these do not grow with the batch
WINDOW = 0.75  # a forecast covers every size from this fraction of its own on
ALLOWANCE = 0.03  # of what is reserved beyond the allocated peak: the part that an unseen workspace can change
ROUNDING = 4096  # bytes that padding to whole rows can add or spare
REPLAYED_REQUESTS = 500_000  # at most, to forecast one size: about a second
DENSE = 64  # up to here the window has every size, above it every 2nd, 4th, …
_LADDER = (*range(1, 17), *(part << octave for octave in range(3, 20) for part in (3, 4)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most that torch's allocator holds; `parts` are the bytes at the allocated peak, and sum to it."""

    allocated_bytes: int
    reserved_bytes: int
    parts: Mapping[str, int]


class SizeModel:
    """The peaks of a workload at any size, from timelines of a few.

        model = SizeModel({1: timeline_1, 4: timeline_4, 16: timeline_16})
        model.peaks(100).reserved_bytes
        model.largest_within(limit, smallest=1, largest=4096)

    `simulated` says whether sizes that were not traced are replayed (or else fitted through the peaks). `after` is a
    size that the same process has run before, as a search does: what it left in place (weights, optimizer state,
    workspaces) lies in segments of its own.
    """

    def __init__(
        self,
        timelines: Mapping[int, AllocatorTimeline],
        settings: AllocatorSettings | None = None,
        *,
        after: int | None = None,
    ) -> None:
        assert timelines
        self._timelines = dict(sorted(timelines.items()))
        self._settings = settings
        self._after = after
        largest = self._timelines[max(self._timelines)]
        alike = [size for size, timeline in self._timelines.items() if timeline.like(largest)]
        self.simulated = len(alike) > 1 or len(self._timelines) == 1
        self._requests = _Requests([(size, self._timelines[size].requests) for size in alike], largest.parts)
        self._replays: dict[int, Peaks] = {}
        self._latest: tuple[int, AllocatorTimeline] | None = None  # the timeline worked out last, and its size

    @property
    def traced_sizes(self) -> tuple[int, ...]:
        """The sizes that were traced."""
        return tuple(self._timelines)

    @property
    def grows_faster_than_a_line(self) -> bool:
        """Whether two sizes are too few: a line through the bytes of some request would be negative at size 0."""
        return len(self._requests.sizes) == 2 and self._requests.below_zero

    def peaks(self, size: int) -> Peaks:
        """The peaks at a size, and never less than at a smaller one.

        A smaller size can reserve more than a larger one, as blocks fall differently into segments. A forecast is about
        «at most so many», so it takes the largest figure of the sizes up to it that have been replayed: those of a
        window below it, and whatever was asked for before.
        """
        own = self.replayed(size)
        for other in self._affordable(_window(size)):
            self.replayed(other)
        above = max(_window(size))  # of many sizes only every 2nd, 4th, … is replayed: this one stands in for its own
        smaller = [peaks for other, peaks in self._replays.items() if other <= size]
        allocated = max(peaks.allocated_bytes for peaks in smaller)
        reserved = max(_with_allowance(peaks) for peaks in (*smaller, self.replayed(above)))
        parts = dict(own.parts)
        parts["temporary"] += allocated - own.allocated_bytes
        return Peaks(allocated_bytes=allocated, reserved_bytes=max(reserved, allocated), parts=parts)

    def replayed(self, size: int) -> Peaks:
        """The peaks at exactly this size, and no other."""
        if size not in self._replays:
            self._replays[size] = self._replay(self._timeline(size)) if self._replays_at(size) else self._fitted(size)
        return self._replays[size]

    def owned(self, size: int) -> Owned:
        """The bytes at the allocated peak by module and part; of each part they sum to that of `peaks(size)`.

        Where `peaks` has another figure than the replay of this size (a smaller size needs more, or the peaks are
        fitted), it is shared out in proportion.
        """
        traced = size if self._replays_at(size) else min(self._timelines, key=lambda at: abs(at - size))
        found = _owned(self._timeline(traced), self._settings)
        settled: Owned = {}
        for part, total in self.peaks(size).parts.items():
            modules = {module: count for (module, of), count in found.items() if of == part}
            if sum(modules.values()) != total:
                modules = _shared_out(total, modules) if modules else {OUTSIDE: total}
            settled.update({(module, part): count for module, count in modules.items() if count})
        return settled

    def runs_within(self, size: int, limit: int) -> bool:
        """Whether the last step runs when the allocator may reserve no more, without it giving back what is cached.

        Short of memory, an allocator puts to use what would otherwise lie idle in its cache: more fits than reserved
        peaks without a limit say.
        """
        known = self._replays.get(size) if self._after is None else None
        if known is not None and known.reserved_bytes <= limit:
            return True  # the same replay: the limit never refuses anything
        if not self._replays_at(size):
            return self.replayed(size).reserved_bytes <= limit
        timeline = self._timeline(size)
        settings = dataclasses.replace(self._settings or AllocatorSettings(), limit_bytes=limit)
        result = replay(timeline.blocks, timeline.requests, settings, pools=timeline.pools)
        return result.fits and result.last_retry < timeline.last_step

    def largest_within(self, limit: int, *, smallest: int, largest: int) -> int:
        """The largest size whose reserved peak stays within the limit; 0 when not even the smallest does."""
        if self.peaks(smallest).reserved_bytes > limit:
            return 0
        low, high = smallest, largest + 1
        size = smallest
        while size < largest and self.replayed(size).reserved_bytes <= limit:
            low, size = size, min(size * 2, largest)
        if self.replayed(size).reserved_bytes <= limit and size == largest:
            low = largest
        else:
            high = size
            low = _bisect(low, high, lambda at: self.replayed(at).reserved_bytes <= limit)
        if self.peaks(low).reserved_bytes <= limit:
            return low
        return _bisect(smallest, low, lambda at: self.peaks(at).reserved_bytes <= limit)

    def _replay(self, timeline: AllocatorTimeline) -> Peaks:
        if self._after is None or not self.simulated:
            return _replayed(timeline, self._settings)
        return _replayed_after(self._timeline(self._after), timeline, self._settings)

    def _affordable(self, window: Sequence[int]) -> Sequence[int]:
        """All of a window, or of a long timeline as many of its sizes as can be replayed in a second or two."""
        most = max(REPLAYED_REQUESTS // max(len(self._timelines[max(self._timelines)].blocks), 1), 1)
        return window if len(window) <= most else window[-most:]

    def _replays_at(self, size: int) -> bool:
        return self.simulated or size in self._timelines

    def _timeline(self, size: int) -> AllocatorTimeline:
        """The traced one, or one worked out from those."""
        if size in self._timelines:
            return self._timelines[size]
        if self._latest is None or self._latest[0] != size:  # one is replayed under several limits
            pattern = self._timelines[max(self._timelines)]
            self._latest = size, dataclasses.replace(pattern, requests=self._requests.at(size))
        return self._latest[1]

    def _fitted(self, size: int) -> Peaks:
        """Through the peaks of the traced sizes: a line or a parabola, with the worst share of reserved memory."""
        traced = {at: self.replayed(at) for at in self._timelines}
        model = ByteModel()
        for at, peaks in traced.items():
            model.observe(at, peaks.allocated_bytes)
        allocated = model.bytes_at(size)
        assert allocated is not None
        nearest = traced[min(traced, key=lambda at: abs(at - size))]
        still = {part: nearest.parts[part] if part in STILL_PARTS else 0 for part in PARTS}
        allocated = max(allocated, sum(still.values()))
        share = max(peaks.reserved_bytes / peaks.allocated_bytes for peaks in traced.values() if peaks.allocated_bytes)
        moving = {part: nearest.parts[part] for part in PARTS if part not in STILL_PARTS}
        return Peaks(
            allocated_bytes=allocated,
            reserved_bytes=math.ceil(allocated * share),
            parts={**still, **_shared_out(allocated - sum(still.values()), moving)},
        )


class _Requests:
    """The bytes of every request as a function of the size: a constant, a line, or a parabola that opens upwards."""

    def __init__(self, traced: Sequence[tuple[int, Sequence[int]]], parts: Sequence[str]) -> None:
        self.sizes = [size for size, _ in traced]
        self._parts = parts
        self._curves = [
            _curve(self.sizes, values) for values in zip(*(requests for _, requests in traced), strict=True)
        ]

    @property
    def below_zero(self) -> bool:
        """Whether some line is more than a rounding of elements and rows below zero at size 0.

        Workspaces do not count: some are taken from a certain size on.
        """
        lines = zip(self._curves, self._parts, strict=True)
        return any(constant < -ROUNDING for (constant, *_), part in lines if part != "workspaces")

    def at(self, size: int) -> tuple[int, ...]:
        square = size * size
        return tuple(
            floor if not (slope or curvature) else max(round(constant + slope * size + curvature * square), floor)
            for constant, slope, curvature, floor in self._curves
        )


def _curve(sizes: Sequence[int], values: Sequence[int]) -> tuple[float, float, float, int]:
    """Constant, slope, curvature, and the smallest value allowed."""
    if len(values) == 1 or values[0] == values[-1] or values[0] == FREE:
        return 0.0, 0.0, 0.0, max(values)
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    constant = values[-1] - slope * sizes[-1]
    if len(values) > 2:
        before = (values[-2] - values[-3]) / (sizes[-2] - sizes[-3])
        curvature = (slope - before) / (sizes[-1] - sizes[-3])
        bend = curvature * (sizes[-1] - sizes[-3]) ** 2
        if bend > 2.0 * len(values):  # more than rounding to whole elements can make of a line
            slope = before - curvature * (sizes[-3] + sizes[-2])
            constant = values[-3] - slope * sizes[-3] - curvature * sizes[-3] ** 2
            return constant, slope, curvature, values[0] if slope < 0 else 0
    if slope <= 0:
        return 0.0, 0.0, 0.0, max(values)
    return constant, slope, 0.0, 0


def _replayed(timeline: AllocatorTimeline, settings: AllocatorSettings | None) -> Peaks:
    result = replay(timeline.blocks, timeline.requests, settings, pools=timeline.pools)
    parts = dict.fromkeys(PARTS, 0)
    for place in _live_at_peak(timeline, result):
        parts[timeline.parts[place]] += result.granted[place]
    return Peaks(allocated_bytes=result.peak_allocated_bytes, reserved_bytes=result.peak_reserved_bytes, parts=parts)


def _owned(timeline: AllocatorTimeline, settings: AllocatorSettings | None) -> Owned:
    result = replay(timeline.blocks, timeline.requests, settings, pools=timeline.pools)
    found: Owned = {}
    for place in _live_at_peak(timeline, result):
        key = (timeline.owners[place] if timeline.owners else OUTSIDE, timeline.parts[place])
        found[key] = found.get(key, 0) + result.granted[place]
    return found


def _live_at_peak(timeline: AllocatorTimeline, result: Replay) -> Iterable[int]:
    """Which requests hold a block at the allocated peak, by their place."""
    live: dict[int, int] = {}
    for place, (name, request) in enumerate(
        zip(timeline.blocks[: result.peak_index + 1], timeline.requests, strict=False)
    ):
        if request == FREE:
            live.pop(name, None)
        else:
            live[name] = place
    return live.values()


def _replayed_after(
    before: AllocatorTimeline, timeline: AllocatorTimeline, settings: AllocatorSettings | None
) -> Peaks:
    """As `_replayed`, in an allocator that has seen another size, kept what stays, and given back the rest."""
    allocator = make_allocator(settings)
    granted: dict[int, int] = {}
    parts: dict[int, str] = {}
    _run_through(allocator, before, granted, parts)
    for name in [name for name, part in parts.items() if part not in KEPT_PARTS and name in granted]:
        allocator.free(name)
        del granted[name]
    allocator.release_cached()
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    allocator.peak_reserved_bytes = allocator.reserved_bytes
    at_peak = _run_through(allocator, timeline, granted, parts, resident=frozenset(granted))
    return Peaks(
        allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes, parts=at_peak
    )


def _run_through(
    allocator: CachingAllocator,
    timeline: AllocatorTimeline,
    granted: dict[int, int],
    parts: dict[int, str],
    *,
    resident: frozenset[int] = frozenset(),
) -> dict[str, int]:
    """Make the requests of a timeline but for what is resident; the bytes of each part at the allocated peak."""
    live = dict.fromkeys(PARTS, 0)
    for name, size in granted.items():
        live[parts[name]] += size
    at_peak = dict(live)
    for name, request, part, pool in zip(
        timeline.blocks, timeline.requests, timeline.parts, timeline.pools, strict=True
    ):
        if name in resident or request == 0:
            continue
        if request == FREE:
            if name in granted:
                allocator.free(name)
                live[part] -= granted.pop(name)
            continue
        before = allocator.peak_allocated_bytes
        granted[name] = allocator.allocate(name, request, pool)
        parts[name] = part
        live[part] += granted[name]
        if allocator.peak_allocated_bytes > before:
            at_peak = dict(live)
    return at_peak


def _with_allowance(peaks: Peaks) -> int:
    return peaks.reserved_bytes + round(ALLOWANCE * (peaks.reserved_bytes - peaks.allocated_bytes))


def _window(size: int) -> list[int]:
    """The sizes that a forecast of this size covers, the last at least as large; the same ones for every caller.

    All from three quarters of it on (above `DENSE` every 2nd, 4th, …); and, because where weights outweigh the batch
    any size may be the one that reserves most, the smallest ones and two of every octave.
    """
    step = 1 << max(0, (size - 1).bit_length() - DENSE.bit_length() + 1)
    first = max(math.ceil(WINDOW * size / step), 1)
    near = [multiple * step for multiple in range(first, -(-size // step) + 1)]
    return sorted({*near, *(other for other in _LADDER if other < near[0])})


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest size from `low`, where it holds, to below `high`, where it does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _shared_out(total: int, shares: Mapping[str, int]) -> dict[str, int]:
    """The total in whole bytes, in proportion to the shares; all of it to `activations` when there are none."""
    whole = sum(shares.values())
    if whole == 0:
        return {part: total if part == "activations" else 0 for part in shares}
    edges = [total * cut // whole for cut in itertools.accumulate(shares.values(), initial=0)]
    return {part: after - before for part, (before, after) in zip(shares, itertools.pairwise(edges), strict=True)}
