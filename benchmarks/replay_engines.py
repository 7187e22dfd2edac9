"""What decides sizes in brim, behind one small function for each kind of replay: when internals move, only this does.

A replay asks for a size, looks at its curve, and says what it saw. Nothing here knows a curve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

from brim.memory.devices import Reading
from brim.records import Probe
from brim.running.governor import Governor
from brim.searching.probe import Scene
from brim.searching.strategy import search_sizes
from brim.settings.search_settings import SearchSettings
from brim.training.micro_sizes import MicroSizes, SizeRequest

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

    scene = Scene(
        device="replay", mode="train", unit="samples", smallest_size=1, largest_size=None, limit_bytes=limit,
        base_bytes=base, reserved_bytes=0, exact=exact, used_by_others_bytes=0, identity=None, environment={},
    )  # fmt: skip
    found = search_sizes(scene, SearchSettings(objective=objective, max_size=last), probe, forecast)
    return found.chosen.batch_size, len(found.probes), sum(probe.verdict == "oom" for probe in found.probes)


class Sizes(Protocol):
    """How large the next batch of live work may be."""

    @property
    def cap(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...
    def ran(self, cost: int, seconds: float, peak_bytes: int | None = None, costliest: int | None = None) -> None: ...
    def ran_out(self, cost: int) -> None: ...


class _GovernorSizes:
    def __init__(self, governor: Governor) -> None:
        self._governor = governor

    @property
    def cap(self) -> int:
        return self._governor.cap

    @property
    def overlaps(self) -> bool:
        return self._governor.overlaps

    def ran(self, cost: int, seconds: float, peak_bytes: int | None = None, costliest: int | None = None) -> None:
        self._governor.succeeded(cost, seconds, peak_bytes, costliest)

    def ran_out(self, cost: int) -> None:
        self._governor.ran_out(cost)


def live_sizes(
    *, first: int, ceiling: int, fixed: bool = False, limit_bytes: int | None = None, base_bytes: int = 0
) -> Sizes:
    """`brim eval`, `map` and `profile`: found on the run's own batches; or `fixed`, the ceiling as far as it fits."""
    governor = Governor(first=first, ceiling=ceiling, grows=not fixed, limit_bytes=limit_bytes)
    governor.model.base_bytes = base_bytes
    return _GovernorSizes(governor)


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


class _MicroSizes:
    def __init__(self, sizes: MicroSizes) -> None:
        self._sizes = sizes

    @property
    def settled(self) -> bool:
        return self._sizes.settled

    @property
    def starts_empty(self) -> bool:
        return self._sizes.new

    @property
    def kept(self) -> int:
        return self._sizes.governor.kept

    def begin_window(self) -> None:
        self._sizes.begin_window()

    def next_length(self, left: int) -> int:
        return self._sizes.next_length(left)

    def ran(self, length: int, seconds: float | None, peak_bytes: int) -> None:
        self._sizes.ran(length, length, seconds, Reading(peak_reserved_bytes=peak_bytes))

    def ran_out(self, length: int) -> None:
        self._sizes.ran_out(length, length, "out of memory")

    def end_window(self) -> None:
        self._sizes.end_window()


def training_sizes(*, window: int, limit_bytes: int) -> TrainingSizes:
    """`brim train`: micro-batches of samples that are all alike, for windows of so many."""
    return _MicroSizes(MicroSizes(SizeRequest(ceiling=None, limit_bytes=limit_bytes, largest=window)))


def forecast_peaks(file: str) -> list[dict[str, Any]]:
    """Every stored peak of a card beside its forecast."""
    from benchmarks.forecast import compared

    return compared([file])
