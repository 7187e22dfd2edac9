"""From settings to sizes: which strategy runs, where it must stop, and what is said of its result.

Drives the pure searches with real probes; knows nothing of devices, caches or ranks.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Protocol, TypeVar

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError, first_line
from brim.forecasting.byte_model import ByteModel
from brim.forecasting.forecast_curve import ForecastCurve
from brim.memory.remedies import memory_remedies
from brim.records import Probe
from brim.searching.fastest import FastestSearch
from brim.searching.largest import LargestSearch
from brim.searching.probe import Scene, WorkloadError
from brim.searching.size_grid import SizeGrid
from brim.settings.search_settings import SearchSettings
from brim.settings.sizes import format_bytes

__all__ = ["Found", "search_sizes", "size_grid"]

ALLOCATOR_NOISE = 0.01  # how far reserved bytes stray from a smooth curve on a caching allocator
ALLOCATOR_RESOLUTION = 0.02  # on such a device a largest size known to 2 % is exact enough
LARGER_TRIED = 2  # sizes above one at which the step raised, before its error is believed
ROUND_SIZES = (2, 4, 8)  # what sizes may have to be multiples of, as --multiple-of then says


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


_S = TypeVar("_S", bound=_Strategy)


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
    """One search: its probes, its limits, its byte model.

    A step may raise an error that is not about memory at one size and run at others: batch normalisation over a pooled
    map needs two samples, a pairwise loss an even number. Raised at the smallest size, it moves that size up; raised
    further up, it ends the search, with `--multiple-of` proposed where that would help.
    """

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
        fastest = settings.objective == "fastest" and settings.batch_size is None
        self._forecast = forecast if fastest else None
        self.model = self._new_model()
        self.smallest = scene.smallest_size
        self.last = _last_size(scene, settings)
        self._raised: dict[int, Exception] = {}  # by size: what the workload itself raised there
        self._notes: list[str] = []

    def fixed(self) -> Found:
        """Exactly the size asked for; where it does not fit, the largest part it can be split into."""
        size = self.settings.batch_size
        assert size is not None
        probe = self._run(size)
        if probe.fits:
            return self._found(probe, "the size asked for, and it fits (--no-auto-batch-size)")
        if self.settings.fail_on_oom or size <= self.smallest:
            raise self._nothing_fits(probe)
        self.last = size - 1
        part = self.largest()
        reason = f"the size asked for ({size}) does not fit and is split into parts of {part.chosen.batch_size}"
        return dataclasses.replace(part, reason=reason)

    def ceiling(self) -> Found | None:
        """The size asked for, if it fits; else None, and the search goes on below it."""
        size = self._grid().floor(self.last)
        probe = self._try(size)
        assert probe is not None  # no larger size is allowed, so that an error is raised
        if probe.fits:
            return self._found(probe, f"the ceiling asked for (-b {self.settings.batch_size}) fits")
        self.last = size - 1
        if self.last < self.smallest:
            raise self._nothing_fits(probe)
        return None

    def largest(self) -> Found:
        """The largest size that fits."""
        resolution = 0.0 if self.scene.exact else ALLOCATOR_RESOLUTION
        limit = self.scene.limit_bytes
        search = self._drive(
            lambda: LargestSearch(self.model, limit_bytes=limit, grid=self._grid(), resolution=resolution)
        )
        chosen = self._fitting(search.largest)
        return self._found(chosen, self._why_largest(chosen))

    def fastest(self) -> Found:
        """The smallest size within tolerance of the best rate in reach."""
        search = self._drive(
            lambda: FastestSearch(
                self.model,
                limit_bytes=self.scene.limit_bytes,
                grid=self._grid(),
                tolerance=self.settings.tolerance,
                headroom=0.0 if self.scene.exact else 0.03,
                forecast=self._forecast,
            )
        )
        chosen, best = search.chosen(), search.best()
        if chosen is None or best is None:
            raise self._nothing_fits(self.probes[-1])
        tolerance = f"{self.settings.tolerance:.0%}"
        if best.batch_size == chosen.batch_size:
            reason = f"the best rate in reach; nothing half as large comes within {tolerance} of it"
        else:
            seen = f"{best.samples_per_second:,.1f}/s at {best.batch_size}"
            reason = f"the smallest size within {tolerance} of the best rate in reach ({seen})"
        return self._found(chosen, reason + ("" if self._finished else self._out_of_probes()))

    def _drive(self, make: Callable[[], _S]) -> _S:
        """A strategy, run until it is done; begun anew, on the probes made so far, where the smallest size moves up."""
        while True:
            self.model = self._new_model()
            strategy = make()
            if self._ask(strategy):
                return strategy

    def _ask(self, strategy: _Strategy) -> bool:
        """Ask, probe, tell, until the strategy is done or the probes allowed are used up; False: begin anew."""
        most = self.settings.max_probes
        while (size := strategy.next_size()) is not None:
            if most is not None and len(self.probes) >= most and self._known(size) is None:
                self._finished = False
                if any(probe.fits for probe in self.probes):
                    return True
                if self.probes[-1].verdict in ("fatal", "timeout"):
                    raise self._nothing_fits(self.probes[-1])
                raise DoesNotFitError(
                    f"none of the {len(self.probes)} sizes tried fits, and --max-probes {most} is used up; "
                    "allow more probes"
                )
            probe = self._try(size)
            if probe is None:
                return False
            strategy.tell(probe)
        return True

    def _try(self, size: int) -> Probe | None:
        """The probe of a size; None where the step raised and the smallest size has moved up above it."""
        probe = self._runs(size)
        if probe is not None:
            return probe
        below_a_fitting_one = any(probe.fits and size < probe.batch_size for probe in self.probes)
        if size == self._grid().first or below_a_fitting_one:
            self._move_smallest_above(size)
            return None
        raise self._proposal(size) or self._raised[size]

    def _run(self, size: int) -> Probe:
        probe = self._probe(size)
        self.probes.append(probe)
        return probe

    def _known(self, size: int) -> Probe | None:
        return next((probe for probe in self.probes if probe.batch_size == size), None)

    def _keep(self, size: int, error: Exception) -> bool:
        """Remember what the workload itself raised at a size; False for what is not its own error."""
        if isinstance(error, BrimError) and not isinstance(error, WorkloadError):
            return False
        traceback.clear_frames(error.__traceback__)  # their variables hold the failed step's tensors
        self._raised[size] = error
        return True

    def _runs(self, size: int) -> Probe | None:
        """The probe of a size, from before or made now; None where the workload raises."""
        if size in self._raised:
            return None
        known = self._known(size)
        if known is not None:
            return known
        try:
            return self._run(size)
        except Exception as error:
            if not self._keep(size, error):
                raise
        return None  # the except block has ended: nothing pins the failed step's tensors any more

    def _move_smallest_above(self, size: int) -> None:
        """The smallest size is the next one at which the step does not raise; if there is none near, its error."""
        grid, larger = self._grid(), size
        for _ in range(LARGER_TRIED):
            larger = grid.up(2 * larger - 1 if larger > size else size)
            probe = self._runs(larger) if larger <= grid.last else None
            if probe is None:
                continue
            if not probe.fits:
                break
            self.smallest = larger
            self._notes.append(
                f"batch size {size} cannot step: {first_line(self._raised[size])}; searched from {larger}"
            )
            return
        raise self._raised[size]

    def _proposal(self, size: int) -> RequestError | None:
        """The advice to use multiples only, where one just below runs and another size beside them does not."""
        fitting = [probe.batch_size for probe in self.probes if probe.fits]
        for number in (factor * self.settings.multiple_of for factor in ROUND_SIZES):
            multiple, other = size - size % number, size - number
            if multiple in (0, size) or other < min(self.scene.smallest_size, *self._raised):
                continue
            if any(one % number == 0 for one in self._raised) or any(one % number for one in fitting):
                continue
            runs = self._runs(multiple)
            if runs is not None and runs.fits and self._runs(other) is None:
                return RequestError(
                    f"batch sizes {other} and {size} cannot step, and {multiple} can: give --multiple-of {number} "
                    f"(at {size}: {first_line(self._raised[size])})"
                )
        return None

    def _new_model(self) -> ByteModel:
        noise = 0.0 if self.scene.exact else ALLOCATOR_NOISE
        prior = None if self._forecast is None else self._forecast.reserved_at
        return ByteModel(base_bytes=self.scene.base_bytes, noise=noise, prior=prior)

    def _grid(self) -> SizeGrid:
        return dataclasses.replace(size_grid(self.scene, self.settings), last=self.last, smallest=self.smallest)

    def _fitting(self, size: int) -> Probe:
        for probe in reversed(self.probes):
            if probe.batch_size == size and probe.fits:
                return probe
        raise self._nothing_fits(self.probes[-1])

    def _found(self, chosen: Probe, reason: str) -> Found:
        largest = max(probe.batch_size for probe in self.probes if probe.fits)
        estimate = self.model.largest_within(self.scene.limit_bytes)
        failed = [probe.batch_size for probe in self.probes if not probe.fits]
        if estimate is not None:
            estimate = max(min([estimate, self.last, *(size - 1 for size in failed)]), largest)
        return Found(
            chosen=chosen,
            largest=largest,
            largest_estimate=estimate,
            reason=reason,
            probes=self.probes,
            notes=(*self._notes, *_notes_on(self.probes)),
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

    def _nothing_fits(self, probe: Probe) -> BrimError:
        """What to raise when no size was seen to fit; `probe` is that of the last size tried."""
        unit = "sample" if probe.batch_size == 1 else "samples"
        if probe.verdict == "fatal":
            return LostError(f"a batch of {probe.batch_size} {unit} broke its process or the device: {probe.detail}")
        if probe.verdict == "timeout":
            return LostError(
                f"a batch of {probe.batch_size} {unit} did not finish: {probe.detail}. It hangs, or it needs a longer "
                "--probe-timeout"
            )
        needed = f"at least {format_bytes(probe.needed_bytes)}" if probe.needed_bytes else "more memory than there is"
        remedies = "\n  - ".join(memory_remedies(self.scene.savings, batch_size=probe.batch_size))
        return DoesNotFitError(
            f"a batch of {probe.batch_size} {unit} does not fit: it needs {needed}, and the memory limit is "
            f"{format_bytes(self.scene.limit_bytes)} on {self.scene.device} ({probe.verdict}: {probe.detail}).\n"
            f"What may help:\n  - {remedies}"
        )


def _notes_on(probes: list[Probe]) -> list[str]:
    """What the probes have shown beside sizes that fit: size limits, crashes, a step that keeps ever more memory."""
    notes = []
    for probe in probes:
        if probe.verdict == "size_limit":
            notes.append(f"at {probe.batch_size} a size limit stops the step, not memory: {probe.detail}")
        elif probe.verdict == "fatal":
            notes.append(f"at {probe.batch_size} the probing process was lost: {probe.detail}")
    growing = next((probe for probe in reversed(probes) if probe.growth_bytes_per_step), None)
    if growing is not None:
        notes.append(
            f"memory in use grows by {format_bytes(growing.growth_bytes_per_step)} with every step (seen at batch size "
            f"{growing.batch_size}): the step keeps something of each batch, such as a loss without .item() or a list "
            "of outputs, and a long run will need more memory than this plan says"
        )
    return notes
