"""What decides sizes in brim, behind one small function for each kind of replay: when internals move, only this does.

A replay asks for a size, reads its curve, and records the result. Nothing here knows a curve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

from brim.records import Probe
from brim.settings.find_settings import SearchSettings
from brim.sizing.live import LiveSizer
from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
from brim.sizing.probing import ProbeContext, SizeSearch
from brim.sizing.sizer import Trial

__all__ = ["Look", "Sizes", "TrainingSizes", "forecast_peaks", "live_sizes", "search", "training_sizes"]


@dataclasses.dataclass(frozen=True)
class Look:
    """One size on a curve; `reserved_bytes` is None where it does not fit."""

    reserved_bytes: int | None
    seconds: float = 0.0
    allocated_bytes: int | None = None


def search(
    objective: Literal["fastest", "largest"],
    look: Callable[[int], Look],
    *,
    limit: int,
    base: int,
    last: int = 65_536,
    exact: bool = False,
    forecast: Any = None,
) -> tuple[int, int, int]:
    """`brim find`: the size chosen, the probes made, and how many of them ran out of memory.

    `exact`: bytes are counted as on the CPU, not by an allocator that caches. `forecast` is a `ForecastCurve`.
    """

    def probe(size: int) -> Probe:
        seen = look(size)
        if seen.reserved_bytes is None:
            return Probe(batch_size=size, verdict="oom", detail="out of memory")
        return Probe(
            batch_size=size,
            verdict="fits",
            peak_allocated_bytes=seen.allocated_bytes or seen.reserved_bytes,
            peak_reserved_bytes=seen.reserved_bytes,
            step_seconds=seen.seconds,
            samples_per_second=size / seen.seconds if seen.seconds else None,
            steps=3,
        )

    context = ProbeContext(
        device="replay", mode="train", unit="samples", smallest_size=1, largest_size=None, limit_bytes=limit,
        base_bytes=base, reserved_bytes=0, exact=exact, used_by_others_bytes=0, identity=None, environment={},
    )  # fmt: skip
    searching = SizeSearch(context, SearchSettings(objective=objective, max_size=last), forecast)
    while searching.found is None:
        searching.record(probe(searching.next_size()))
    found = searching.found
    return found.chosen.batch_size, len(found.probes), sum(probe.verdict == "oom" for probe in found.probes)


class Sizes(Protocol):
    """How large the next batch of live work may be."""

    @property
    def cap(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...
    def ran(self, cost: int, seconds: float, peak_bytes: int | None = None, costliest: int | None = None) -> None: ...
    def ran_out(self, cost: int) -> None: ...


class _LiveSizes:
    def __init__(self, sizer: LiveSizer) -> None:
        self._sizer = sizer

    @property
    def cap(self) -> int:
        return self._sizer.size

    @property
    def overlaps(self) -> bool:
        return self._sizer.overlaps

    def ran(self, cost: int, seconds: float, peak_bytes: int | None = None, costliest: int | None = None) -> None:
        self._sizer.record(Trial(size=cost, seconds=seconds, peak_bytes=peak_bytes, costliest_item=costliest))

    def ran_out(self, cost: int) -> None:
        self._sizer.record(Trial(size=cost, verdict="oom"))


def live_sizes(
    *, first: int, ceiling: int, fixed: bool = False, limit_bytes: int | None = None, base_bytes: int = 0
) -> Sizes:
    """`brim eval`, `map` and `profile`: found on the run's own batches; or `fixed`, the ceiling as far as it fits."""
    sizer = LiveSizer(first=first, ceiling=ceiling, grows=not fixed, limit_bytes=limit_bytes)
    sizer.evidence.bytes.base_bytes = base_bytes
    return _LiveSizes(sizer)


class TrainingSizes(Protocol):
    """How long the next micro-batch may be."""

    @property
    def settled(self) -> bool: ...
    @property
    def starts_empty(self) -> bool:
        """Whether the cache is given back before the next one."""

    @property
    def kept(self) -> int: ...
    def begin_window(self) -> None: ...
    def next_length(self, left: int) -> int: ...
    def ran(self, length: int, seconds: float | None, peak_bytes: int) -> None: ...
    def ran_out(self, length: int) -> None: ...
    def end_window(self) -> None: ...


class _MicroBatchSizes:
    def __init__(self, sizes: MicroBatchSizer) -> None:
        self._sizes = sizes

    @property
    def settled(self) -> bool:
        return self._sizes.settled

    @property
    def starts_empty(self) -> bool:
        return self._sizes.new

    @property
    def kept(self) -> int:
        return self._sizes.live.kept

    def begin_window(self) -> None:
        self._sizes.begin_window()

    def next_length(self, left: int) -> int:
        return self._sizes.next_length(left)

    def ran(self, length: int, seconds: float | None, peak_bytes: int) -> None:
        self._sizes.record(
            Probe(
                batch_size=length, cost=length, verdict="fits", step_seconds=seconds, peak_allocated_bytes=0,
                peak_reserved_bytes=peak_bytes,
            )
        )  # fmt: skip

    def ran_out(self, length: int) -> None:
        self._sizes.record(Probe(batch_size=length, cost=length, verdict="oom", detail="out of memory"))

    def end_window(self) -> None:
        self._sizes.end_window()


def training_sizes(*, window: int, limit_bytes: int) -> TrainingSizes:
    """`brim train`: micro-batches of samples that are all alike, for windows of so many."""
    return _MicroBatchSizes(MicroBatchSizer(MicroBatchRequest(ceiling=None, limit_bytes=limit_bytes, largest=window)))


def forecast_peaks(file: str) -> list[dict[str, Any]]:
    """Every stored peak of a card beside its forecast."""
    from benchmarks.forecast import compared

    return compared([file])
