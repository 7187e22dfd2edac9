"""A search by probes, from what was asked to a size and the reason for it: which strategy runs, and where it must stop.

    search = SizeSearch(context, settings, forecast)
    while not search.settled:
        search.record(prober.probe(search.next_size()))
    search.found

A step may raise an error that is not about memory at one size and run at others: batch normalisation over a pooled map
needs two samples, a pairwise loss an even number. Raised at the smallest size, it moves that size up; raised further
up, it ends the search, with `--multiple-of` proposed where that would help. Knows nothing of devices, caches or ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError, first_line
from brim.memory.failures import memory_remedies
from brim.records import Mode, Probe, Unit
from brim.settings.caller import given, named
from brim.settings.find_settings import SearchSettings
from brim.settings.sizes import format_bytes
from brim.sizing.byte_model import ByteModel
from brim.sizing.constants import (
    ALLOCATOR_NOISE,
    ALLOCATOR_RESOLUTION,
    LARGER_SIZES_TRIED,
    MAX_FORECAST_ERROR,
    ROUND_SIZES,
    USABLE_LIMIT_FRACTION,
)
from brim.sizing.fastest import FastestSizer
from brim.sizing.largest import LargestSizer
from brim.sizing.priors import ForecastCurve
from brim.sizing.sizer import Evidence, ProbingSizer, SizeGrid, Trial

__all__ = ["ProbeContext", "SearchResult", "SizeSearch", "notes_on", "size_grid"]

_Result = TypeVar("_Result")
_Strategy = TypeVar("_Strategy", bound=ProbingSizer)
# Sizes go out; the probe of each comes in, or what the workload itself raised there.
_Steps = Generator[int, "Probe | Exception", _Result]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeContext:
    """All that a search needs to know of a workload and its device, as plain values."""

    device: str
    mode: Mode
    unit: Unit
    smallest_size: int
    largest_size: int | None
    limit_bytes: int
    base_bytes: int  # resident before any step
    reserved_bytes: int  # kept free beside every probe
    exact: bool  # the same step always reads the same bytes
    used_by_others_bytes: int
    notes: tuple[str, ...] = ()
    savings: tuple[str, ...] = ()  # what would take less memory
    identity: dict[str, Any] | None  # what the plan is cached under; None: not at all
    environment: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The size that a search has found, and why."""

    chosen: Probe
    largest: int
    largest_estimate: int | None
    reason: str
    probes: list[Probe]
    notes: tuple[str, ...] = ()
    complete: bool = True  # False: cut short by --max-probes or a probe's time limit, so not worth keeping


def size_grid(context: ProbeContext, settings: SearchSettings) -> SizeGrid:
    """The sizes that a search of this workload under these settings may try."""
    bounds = [settings.max_size, context.largest_size, settings.batch_size]
    return SizeGrid(
        last=min(bound for bound in bounds if bound is not None),
        smallest=context.smallest_size,
        multiple_of=settings.multiple_of,
        power_of_two=settings.power_of_two,
    )


class SizeSearch:
    """Asks for sizes until the objective is met; `DoesNotFitError` when none fits.

    `forecast` saves the search for the fastest its first steps; probes correct it.
    """

    def __init__(self, context: ProbeContext, settings: SearchSettings, forecast: ForecastCurve | None = None) -> None:
        self.context = context
        self.settings = settings
        self.probes: list[Probe] = []
        self.found: SearchResult | None = None  # once settled
        fastest = settings.objective == "fastest" and settings.batch_size is None
        self._forecast = forecast if fastest else None
        self._grid = size_grid(context, settings)
        self._evidence = self._new_evidence()
        self._finished = True  # until the probes allowed are used up
        self._raised: dict[int, Exception] = {}  # by size: what the workload itself raised there
        self._notes: list[str] = []
        self._steps = self._search()
        self._next = next(self._steps)

    @property
    def settled(self) -> bool:
        """Whether the size is found."""
        return self.found is not None

    def next_size(self) -> int:
        """The size to probe next; once settled, the size found."""
        return self._next if self.found is None else self.found.chosen.batch_size

    def record(self, outcome: Probe | Exception) -> None:
        """The probe of the size asked for, or what the workload itself raised there."""
        if isinstance(outcome, Probe):
            self.probes.append(outcome)
        else:
            self._raised[self._next] = outcome
        try:
            self._next = self._steps.send(outcome)
        except StopIteration as end:
            self.found = end.value

    def _search(self) -> _Steps[SearchResult]:
        if self.settings.fixed:
            return (yield from self._fixed())
        if self.settings.batch_size is not None:
            found = yield from self._ceiling()
            if found is not None:
                return found
        return (yield from (self._largest() if self.settings.objective == "largest" else self._fastest()))

    def _fixed(self) -> _Steps[SearchResult]:
        """Exactly the size asked for; where it does not fit, the largest part it can be split into."""
        size = self.settings.batch_size
        assert size is not None
        probe = yield size
        if isinstance(probe, Exception):
            raise probe
        if probe.fits:
            return self._result(probe, f"the size asked for, and it fits ({named('no_auto_batch_size')})")
        if self.settings.fail_on_oom:
            raise self._nothing_fits(probe)
        self._continue_below(probe)
        part = yield from self._largest()
        reason = f"the size asked for ({size}) does not fit and is split into parts of {part.chosen.batch_size}"
        return dataclasses.replace(part, reason=reason)

    def _ceiling(self) -> _Steps[SearchResult | None]:
        """The size asked for, if it fits; else None, and the search continues below it."""
        size = self._grid.floor(self._grid.last)
        probe = yield from self._try(size)
        assert probe is not None  # no larger size is allowed, so that an error is raised
        if probe.fits:
            return self._result(probe, f"the ceiling asked for (-b {self.settings.batch_size}) fits")
        self._continue_below(probe)
        return None

    def _continue_below(self, probe: Probe) -> None:
        """Only sizes below one that does not fit; where none is allowed, nothing fits."""
        last = self._grid.floor(probe.batch_size - 1)
        if last == 0:
            raise self._nothing_fits(probe)
        self._grid = dataclasses.replace(self._grid, last=last)

    def _largest(self) -> _Steps[SearchResult]:
        """The largest size that fits."""
        resolution = 0.0 if self.context.exact else ALLOCATOR_RESOLUTION
        sizer = yield from self._drive(lambda: LargestSizer(self._evidence, grid=self._grid, resolution=resolution))
        chosen = self._known(sizer.largest)
        if chosen is None or not chosen.fits:
            raise self._nothing_fits(self.probes[-1])
        return self._result(chosen, self._why_largest(chosen))

    def _fastest(self) -> _Steps[SearchResult]:
        """The smallest size within tolerance of the best rate in reach."""
        sizer = yield from self._drive(
            lambda: FastestSizer(
                self._evidence,
                grid=self._grid,
                tolerance=self.settings.tolerance,
                usable=1.0 if self.context.exact else USABLE_LIMIT_FRACTION,
                forecast=self._forecast,
            )
        )
        trial, best = sizer.chosen(), sizer.best()
        if trial is None or best is None:
            raise self._nothing_fits(self.probes[-1])
        chosen = self._known(trial.size)
        assert chosen is not None
        tolerance = f"{self.settings.tolerance:.0%}"
        if best.size == trial.size:
            reason = f"the best rate in reach; nothing half as large comes within {tolerance} of it"
        else:
            seen = f"{best.rate:,.1f}/s at {best.size}"
            reason = f"the smallest size within {tolerance} of the best rate in reach ({seen})"
        return self._result(chosen, reason + ("" if self._finished else self._out_of_probes()))

    def _drive(self, make: Callable[[], _Strategy]) -> _Steps[_Strategy]:
        """A strategy, run until it is done; restarted on the probes made so far if the smallest size rises."""
        while True:
            self._evidence = self._new_evidence()
            sizer = make()
            while not sizer.settled and not self._probes_used_up(sizer.next_size()):
                probe = yield from self._try(sizer.next_size())
                if probe is None:
                    break
                sizer.record(Trial.of_probe(probe))
            else:
                return sizer

    def _probes_used_up(self, size: int) -> bool:
        """Whether a further probe is one too many; an error where none so far fits."""
        most = self.settings.max_probes
        if most is None or len(self.probes) < most or self._known(size) is not None:
            return False
        self._finished = False
        if any(probe.fits for probe in self.probes):
            return True
        if self.probes[-1].verdict in ("fatal", "timeout"):
            raise self._nothing_fits(self.probes[-1])
        raise DoesNotFitError(
            f"none of the {len(self.probes)} sizes tried fits, and {given('max_probes', most)} is used up; "
            "allow more probes"
        )

    def _try(self, size: int) -> _Steps[Probe | None]:
        """The probe of a size; None where the step raised and the smallest size has moved up above it."""
        probe = yield from self._runs(size)
        if probe is not None:
            return probe
        below_a_fitting_one = any(probe.fits and size < probe.batch_size for probe in self.probes)
        if size == self._grid.first or below_a_fitting_one:
            yield from self._move_smallest_above(size)
            return None
        raise (yield from self._proposal(size)) or self._raised[size]

    def _runs(self, size: int) -> _Steps[Probe | None]:
        """The probe of a size, from before or made now; None where the workload raises."""
        if size in self._raised:
            return None
        known = self._known(size)
        if known is not None:
            return known
        outcome = yield size
        return None if isinstance(outcome, Exception) else outcome

    def _known(self, size: int) -> Probe | None:
        return next((probe for probe in self.probes if probe.batch_size == size), None)

    def _move_smallest_above(self, size: int) -> _Steps[None]:
        """The smallest size is the next one at which the step does not raise; if there is none near, its error."""
        grid, larger = self._grid, size
        for _ in range(LARGER_SIZES_TRIED):
            larger = grid.up(2 * larger - 1 if larger > size else size)
            probe = (yield from self._runs(larger)) if larger <= grid.last else None
            if probe is None:
                continue
            if not probe.fits:
                break
            self._grid = dataclasses.replace(self._grid, smallest=larger)
            self._notes.append(
                f"batch size {size} cannot step: {first_line(self._raised[size])}; searched from {larger}"
            )
            return
        raise self._raised[size]

    def _proposal(self, size: int) -> _Steps[RequestError | None]:
        """The advice to use multiples only, where one just below runs and another size beside them does not."""
        fitting = [probe.batch_size for probe in self.probes if probe.fits]
        for number in (factor * self.settings.multiple_of for factor in ROUND_SIZES):
            multiple, other = size - size % number, size - number
            if multiple in (0, size) or other < min(self.context.smallest_size, *self._raised):
                continue
            if any(one % number == 0 for one in self._raised) or any(one % number for one in fitting):
                continue
            runs = yield from self._runs(multiple)
            if runs is not None and runs.fits and (yield from self._runs(other)) is None:
                return RequestError(
                    f"batch sizes {other} and {size} cannot step, and {multiple} can: give "
                    f"{given('multiple_of', number)} (at {size}: {first_line(self._raised[size])})"
                )
        return None

    def _new_evidence(self) -> Evidence:
        noise = 0.0 if self.context.exact else ALLOCATOR_NOISE
        prior = None if self._forecast is None else self._forecast.reserved_at
        curve = ByteModel(base_bytes=self.context.base_bytes, noise=noise, prior=prior)
        curve.most_off = MAX_FORECAST_ERROR
        return Evidence(curve, limit_bytes=self.context.limit_bytes)

    def _result(self, chosen: Probe, reason: str) -> SearchResult:
        largest = max(probe.batch_size for probe in self.probes if probe.fits)
        estimate = self._evidence.bytes.largest_within(self.context.limit_bytes)
        failed = [probe.batch_size for probe in self.probes if not probe.fits]
        if estimate is not None:
            estimate = max(min([estimate, self._grid.last, *(size - 1 for size in failed)]), largest)
        return SearchResult(
            chosen=chosen,
            largest=largest,
            largest_estimate=estimate,
            reason=reason,
            probes=self.probes,
            notes=(*self._notes, *notes_on(self.probes)),
            complete=self._finished and not any(probe.verdict == "timeout" for probe in self.probes),
        )

    def _why_largest(self, chosen: Probe) -> str:
        above = [probe for probe in self.probes if not probe.fits and probe.batch_size > chosen.batch_size]
        if not self._finished:
            return "the largest size seen to fit" + self._out_of_probes()
        if not above:
            return f"the largest size allowed ({chosen.batch_size}) fits"
        nearest = min(above, key=lambda probe: probe.batch_size)
        return f"the largest size that fits: {nearest.batch_size} does not ({nearest.verdict})"

    def _out_of_probes(self) -> str:
        return f"; {given('max_probes', self.settings.max_probes)} was used up, so a better size may exist"

    def _nothing_fits(self, probe: Probe) -> BrimError:
        """What to raise when no size was seen to fit; `probe` is that of the last size tried."""
        unit = "sample" if probe.batch_size == 1 else "samples"
        if probe.verdict == "fatal":
            return LostError(f"a batch of {probe.batch_size} {unit} broke its process or the device: {probe.detail}")
        if probe.verdict == "timeout":
            return LostError(
                f"a batch of {probe.batch_size} {unit} did not finish: {probe.detail}. It hangs, or it needs a longer "
                f"{named('probe_timeout')}"
            )
        needed = f"at least {format_bytes(probe.needed_bytes)}" if probe.needed_bytes else "more memory than there is"
        remedies = "\n  - ".join(memory_remedies(self.context.savings, batch_size=probe.batch_size))
        return DoesNotFitError(
            f"a batch of {probe.batch_size} {unit} does not fit: it needs {needed}, and the memory limit is "
            f"{format_bytes(self.context.limit_bytes)} on {self.context.device} ({probe.verdict}: {probe.detail}).\n"
            f"What may help:\n  - {remedies}"
        )


def notes_on(probes: list[Probe]) -> list[str]:
    """What the probes have shown beside sizes that fit: size limits, crashes, a step that keeps ever more memory."""
    notes = []
    for probe in probes:
        if probe.verdict == "size_limit":
            notes.append(f"at {probe.batch_size} a size limit stops the step, not memory: {probe.detail}")
        elif probe.verdict == "fatal":
            notes.append(f"at {probe.batch_size} the probing process was lost: {probe.detail}")
    # A step that keeps something keeps it at every size; at one size alone it is a workspace made late.
    timed = [probe for probe in probes if probe.verdict in ("fits", "thrashes")]
    if timed and all(probe.growth_bytes_per_step for probe in timed):
        growing = timed[-1]
        notes.append(
            f"memory in use grows by {format_bytes(growing.growth_bytes_per_step)} with every step (seen at batch size "
            f"{growing.batch_size}): the step keeps something of each batch, such as a loss without .item() or a list "
            "of outputs, and a long run will need more memory than this plan says"
        )
    return notes
