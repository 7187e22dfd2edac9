"""From settings to sizes: which strategy runs, where it must stop, and what is said of its result.

Drives the pure searches with real probes; knows nothing of devices, caches or ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from brim.config.search_settings import SearchSettings
from brim.config.sizes import format_bytes
from brim.errors import DoesNotFitError
from brim.forecast.byte_model import ByteModel
from brim.forecast.forecast_curve import ForecastCurve
from brim.memory.remedies import memory_remedies
from brim.records import Probe
from brim.search.fastest import FastestSearch
from brim.search.largest import LargestSearch
from brim.search.probe import Scene
from brim.search.size_grid import SizeGrid

__all__ = ["Found", "search_sizes", "size_grid"]

ALLOCATOR_NOISE = 0.01  # how far reserved bytes stray from a smooth curve on a caching allocator
ALLOCATOR_RESOLUTION = 0.02  # on such a device a largest size known to 2 % is exact enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    chosen: Probe
    largest: int
    largest_estimate: int | None
    reason: str
    probes: list[Probe]
    notes: tuple[str, ...] = ()
    complete: bool = True  # False: cut short by --max-probes or a probe's time limit, so not worth keeping


class _Strategy(Protocol):
    def next_size(self) -> int | None: ...
    def tell(self, probe: Probe) -> None: ...


def search_sizes(
    scene: Scene,
    settings: SearchSettings,
    probe: Callable[[int], Probe],
    forecast: ForecastCurve | None = None,
) -> Found:
    """Probe sizes until the objective is met, and say why this one; `DoesNotFitError` when none fits.

    `forecast` saves the search for the fastest its first steps; probes correct it.
    """
    search = _Search(scene, settings, probe, forecast)
    if settings.fixed:
        return search.fixed()
    found = search.ceiling() if settings.batch_size is not None else None
    if found is not None:
        return found
    return search.largest() if settings.objective == "largest" else search.fastest()


def size_grid(scene: Scene, settings: SearchSettings) -> SizeGrid:
    """The sizes that a search of this workload under these settings may try."""
    return SizeGrid(
        last=_last_size(scene, settings),
        smallest=scene.smallest_size,
        multiple_of=settings.multiple_of,
        power_of_two=settings.power_of_two,
    )


def _last_size(scene: Scene, settings: SearchSettings) -> int:
    bounds = [settings.max_size, scene.largest_size, settings.batch_size]
    return min(bound for bound in bounds if bound is not None)


class _Search:
    """One search: its probes, its limits, its byte model."""

    def __init__(
        self,
        scene: Scene,
        settings: SearchSettings,
        probe: Callable[[int], Probe],
        forecast: ForecastCurve | None = None,
    ) -> None:
        self.scene = scene
        self.settings = settings
        self.probes: list[Probe] = []
        self._probe = probe
        self._finished = True  # until the probes allowed are used up
        noise = 0.0 if scene.exact else ALLOCATOR_NOISE
        fastest = settings.objective == "fastest" and settings.batch_size is None
        self._forecast = forecast if fastest else None
        prior = None if self._forecast is None else self._forecast.reserved_at
        self.model = ByteModel(base_bytes=scene.base_bytes, noise=noise, prior=prior)
        self.last = _last_size(scene, settings)

    def fixed(self) -> Found:
        """Exactly the size asked for; where it does not fit, the largest part it can be split into."""
        size = self.settings.batch_size
        assert size is not None
        probe = self._try(size)
        if probe.fits:
            return self._found(probe, "the size asked for, and it fits (--no-auto-batch-size)")
        if self.settings.fail_on_oom or size <= self.scene.smallest_size:
            raise self._does_not_fit(probe)
        self.last = size - 1
        part = self.largest()
        reason = f"the size asked for ({size}) does not fit and is split into parts of {part.chosen.batch_size}"
        return dataclasses.replace(part, reason=reason)

    def ceiling(self) -> Found | None:
        """The size asked for, if it fits; else None, and the search goes on below it."""
        size = self._grid().floor(self.last)
        probe = self._try(size)
        if probe.fits:
            return self._found(probe, f"the ceiling asked for (-b {self.settings.batch_size}) fits")
        self.last = size - 1
        if self.last < self.scene.smallest_size:
            raise self._does_not_fit(probe)
        return None

    def largest(self) -> Found:
        """The largest size that fits."""
        resolution = 0.0 if self.scene.exact else ALLOCATOR_RESOLUTION
        limit = self.scene.limit_bytes
        search = LargestSearch(self.model, limit_bytes=limit, grid=self._grid(), resolution=resolution)
        self._drive(search)
        chosen = self._fitting(search.largest)
        return self._found(chosen, self._why_largest(chosen))

    def fastest(self) -> Found:
        """The smallest size within tolerance of the best rate in reach."""
        search = FastestSearch(
            self.model,
            limit_bytes=self.scene.limit_bytes,
            grid=self._grid(),
            tolerance=self.settings.tolerance,
            headroom=0.0 if self.scene.exact else 0.03,
            forecast=self._forecast,
        )
        self._drive(search)
        chosen, best = search.chosen(), search.best()
        if chosen is None or best is None:
            raise self._does_not_fit(self.probes[-1])
        tolerance = f"{self.settings.tolerance:.0%}"
        if best.batch_size == chosen.batch_size:
            reason = f"the best rate in reach; nothing half as large comes within {tolerance} of it"
        else:
            seen = f"{best.samples_per_second:,.1f}/s at {best.batch_size}"
            reason = f"the smallest size within {tolerance} of the best rate in reach ({seen})"
        return self._found(chosen, reason + ("" if self._finished else self._out_of_probes()))

    def _drive(self, strategy: _Strategy) -> None:
        """Ask, probe, tell, until the strategy is done or the probes allowed are used up."""
        while (size := strategy.next_size()) is not None:
            if self.settings.max_probes is not None and len(self.probes) >= self.settings.max_probes:
                self._finished = False
                if any(probe.fits for probe in self.probes):
                    return
                raise DoesNotFitError(
                    f"none of the {len(self.probes)} sizes tried fits, and --max-probes {self.settings.max_probes} "
                    "is used up; allow more probes"
                )
            strategy.tell(self._try(size))

    def _try(self, size: int) -> Probe:
        probe = self._probe(size)
        self.probes.append(probe)
        return probe

    def _grid(self) -> SizeGrid:
        return dataclasses.replace(size_grid(self.scene, self.settings), last=self.last)

    def _fitting(self, size: int) -> Probe:
        for probe in reversed(self.probes):
            if probe.batch_size == size and probe.fits:
                return probe
        raise self._does_not_fit(self.probes[-1])

    def _found(self, chosen: Probe, reason: str) -> Found:
        largest = max(probe.batch_size for probe in self.probes if probe.fits)
        estimate = self.model.largest_within(self.scene.limit_bytes)
        failed = [probe.batch_size for probe in self.probes if not probe.fits]
        if estimate is not None:
            estimate = max(min([estimate, self.last, *(size - 1 for size in failed)]), largest)
        notes = tuple(
            f"at {probe.batch_size} a size limit stops the step, not memory: {probe.detail}"
            for probe in self.probes
            if probe.verdict == "size_limit"
        )
        return Found(
            chosen=chosen,
            largest=largest,
            largest_estimate=estimate,
            reason=reason,
            probes=self.probes,
            notes=notes,
            complete=self._finished and not any(probe.verdict == "timeout" for probe in self.probes),
        )

    def _why_largest(self, chosen: Probe) -> str:
        above = [probe for probe in self.probes if not probe.fits and probe.batch_size > chosen.batch_size]
        if not self._finished:
            return "the largest size seen to fit" + self._out_of_probes()
        if not above:
            return f"the largest size allowed ({self.last}) fits"
        nearest = min(above, key=lambda probe: probe.batch_size)
        return f"the largest size that fits: {nearest.batch_size} does not ({nearest.verdict})"

    def _out_of_probes(self) -> str:
        return f"; --max-probes {self.settings.max_probes} was used up, so a better size may exist"

    def _does_not_fit(self, probe: Probe) -> DoesNotFitError:
        unit = "sample" if probe.batch_size == 1 else "samples"
        needed = f"at least {format_bytes(probe.needed_bytes)}" if probe.needed_bytes else "more memory than there is"
        why = {"timeout": "did not finish in time", "fatal": "broke the device"}.get(probe.verdict, f"needs {needed}")
        remedies = "\n  - ".join(memory_remedies(self.scene.savings, batch_size=probe.batch_size))
        return DoesNotFitError(
            f"a batch of {probe.batch_size} {unit} does not fit: it {why}, and the memory limit is "
            f"{format_bytes(self.scene.limit_bytes)} on {self.scene.device} ({probe.verdict}: {probe.detail}).\n"
            f"What may help:\n  - {remedies}"
        )
