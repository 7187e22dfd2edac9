"""The search from end to end: cache, probes, strategy, plan; on every rank, with one answer for all.

`find_plan` searches for any workload; `brim.planning.find` makes one of a name or of functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from brim.errors import BrimError
from brim.forecasting.forecast import forecast_curve
from brim.memory.device_start import load_libraries
from brim.ranks.agreement import Agreement
from brim.records import MemoryFigures, Plan, Probe, SearchSeconds
from brim.searching.probe import DeviceProber, Prober, ProbeSettings, WorkloadError
from brim.settings.find_settings import SearchSettings
from brim.settings.sizes import format_bytes
from brim.sizing.plans import CachedPlan, PlanCache
from brim.sizing.priors import ForecastCurve
from brim.sizing.probing import ProbeContext, SearchResult, SizeSearch, size_grid
from brim.storage.fingerprint import fingerprint
from brim.workloads.base import Workload

__all__ = ["SearchListener", "find_plan", "find_with"]


class SearchListener:
    """Is called as a search proceeds; the command line prints its table from this."""

    def started(self, context: ProbeContext) -> None:
        """The search knows its device and limit."""

    def trying(self, size: int) -> None:
        """A probe begins."""

    def tried(self, probe: Probe) -> None:
        """A probe has ended."""


def find_plan(
    workload: Workload,
    settings: SearchSettings | None = None,
    *,
    preserve_state: bool = True,
    listener: SearchListener | None = None,
    cache: PlanCache | None = None,
) -> Plan:
    """The plan for a workload, probed in this process; everything a probe changes is put back.

    Args:
        workload: What runs on one batch: a subclass of `Workload`.
        settings: Limits and objective of the search; by default the fastest size within the free memory.
        preserve_state: Put weights, gradients, optimizer state and random generators back afterwards.
        listener: Is called as the search proceeds.
        cache: Where plans are kept; by default the user's cache folder.

    Returns:
        The plan: `batch_size`, `batch_size_max`, `reason` and the `probes` that it rests on.

    Raises:
        RequestError: The request is wrong; the message names the setting, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device or a rank was lost.

    Examples:
        >>> class Squares(brim.Workload):
        ...     def make_batch(self, size):
        ...         return torch.ones(size, 1024)
        ...
        ...     def step(self, batch):
        ...         return batch**2
        >>> brim.find_plan(Squares(), brim.SearchSettings(memory_limit_bytes=2**24)).objective
        'fastest'
    """
    settings = settings or SearchSettings()
    prober = DeviceProber(workload, probe_settings(settings), preserve_state=preserve_state)
    return find_with(prober, settings, listener=listener, cache=cache)


def find_with(
    prober: Prober,
    settings: SearchSettings,
    *,
    listener: SearchListener | None = None,
    cache: PlanCache | None = None,
) -> Plan:
    """The plan that a prober's probes lead to; under torchrun every rank searches, then all agree."""
    listener = listener or SearchListener()
    started = time.perf_counter()
    with Agreement(purpose="a search for a batch size") as agreement, agreement.step(Plan) as step:
        with prober:
            search = _Search(prober, settings, listener)
            own = step.value = search.plan(cache or PlanCache())
        alone = time.perf_counter() - started
    if len(step.values) > 1:
        own = _agreed(own, step.values, keep_own=settings.per_rank or prober.context.mode != "train")
    total = time.perf_counter() - started
    seconds = SearchSeconds.of(
        own.probes, total=total, forecast=search.forecast_seconds, state=prober.state_seconds, ranks=total - alone
    )
    return dataclasses.replace(own, seconds=seconds)


def probe_settings(settings: SearchSettings) -> ProbeSettings:
    """The part of the search's settings that each probe runs under."""
    return ProbeSettings(
        memory_limit_bytes=settings.memory_limit_bytes,
        margin=settings.margin,
        timeout_seconds=settings.probe_timeout_seconds,
    )


class _Search:
    """One search with a prober, and the seconds of it that are not spent on probes."""

    def __init__(self, prober: Prober, settings: SearchSettings, listener: SearchListener) -> None:
        self.prober = prober
        self.settings = settings
        self.listener = listener
        self.forecast_seconds = 0.0

    def plan(self, cache: PlanCache) -> Plan:
        """The plan from the cache where it holds, or else from probes."""
        prober, settings, context = self.prober, self.settings, self.prober.context
        self.listener.started(context)
        identity = _cache_identity(context, settings)
        entry: CachedPlan | None = None
        ignored: tuple[str, ...] = ()
        if identity is not None and settings.use_cache:
            entry, ignored = cache.load(identity, lambda plan: _problem_of(plan, context, settings))
        if entry is not None:
            plan = _from_cache(entry, prober, settings, self.listener)
            if plan is not None:
                if plan.probes:  # a stale plan, verified: file it under the environment of today
                    verified = dataclasses.replace(plan, cached=False, reason=entry.plan.reason)
                    cache.save(verified, identity or {}, context.environment)
                return plan
        found, notes = self._probed()
        plan = _make_plan(found, context, settings, identity)
        plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
        if identity is not None and settings.use_cache and found.complete:
            cache.save(plan, identity, context.environment)
        return dataclasses.replace(plan, notes=(*plan.notes, *ignored))  # of this search alone, so it is not cached

    def _probed(self) -> tuple[SearchResult, tuple[str, ...]]:
        """Probe the sizes that a search asks for, until it has found one; and notes for the user."""
        with self._deciding():
            forecast, notes = _forecast(self.prober, self.settings)
            search = SizeSearch(self.prober.context, self.settings, forecast)
        while search.found is None:
            outcome: Probe | Exception
            try:
                outcome = _probe(self.prober, search.next_size(), self.listener)
            except Exception as error:
                if isinstance(error, BrimError) and not isinstance(error, WorkloadError):
                    raise
                traceback.clear_frames(error.__traceback__)  # their variables hold the failed step's tensors
                outcome = error
            with self._deciding():
                search.record(outcome)  # the except block has ended: nothing pins the failed step's tensors any more
        return search.found, notes

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.forecast_seconds += time.perf_counter() - started


def _probe(prober: Prober, size: int, listener: SearchListener) -> Probe:
    listener.trying(size)
    probe = prober.probe(size)
    listener.tried(probe)
    return probe


def _forecast(prober: Prober, settings: SearchSettings) -> tuple[ForecastCurve | None, tuple[str, ...]]:
    """What to start the search for the fastest from, where the workload is in this process and can be traced."""
    if settings.objective != "fastest" or settings.batch_size is not None or not isinstance(prober, DeviceProber):
        return None, ()
    workload = prober.workload
    loaded = load_libraries(workload.device, _computes_in(workload), workload.modules())
    try:
        return forecast_curve(workload)
    finally:
        loaded()


def _computes_in(workload: Workload) -> torch.dtype:
    """The dtype of a workload's products, as far as it says: autocast's, or that of its weights."""
    known = getattr(torch, str((workload.identity() or {}).get("dtype")), None)
    if isinstance(known, torch.dtype):
        return known
    weights = (parameter for module in workload.modules() for parameter in module.parameters())
    return next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)


def _cache_identity(context: ProbeContext, settings: SearchSettings) -> dict[str, Any] | None:
    """What a plan is filed under: the workload, the device, and what was asked of the search."""
    if context.identity is None:
        return None
    asked = dataclasses.asdict(settings)
    for name in ("use_cache", "per_rank", "max_probes", "probe_timeout_seconds"):
        del asked[name]  # these change how a plan is found, not which one is right
    return {
        "workload": context.identity,
        "mode": context.mode,
        "device": context.device,
        "reserved_bytes": context.reserved_bytes,
        "settings": asked,
    }


def _problem_of(plan: Plan, context: ProbeContext, settings: SearchSettings) -> str | None:
    """Why a cached plan cannot be what a search under these settings found; None if it can."""
    chosen = plan.chosen_probe()
    if (plan.unit, plan.objective) != (context.unit, settings.objective):
        return f"it is for the {plan.objective} size in {plan.unit}"
    if chosen is None or chosen.peak_reserved_bytes is None:
        return f"none of its probes has a peak at its batch size {plan.size} and fits"
    if plan.size > plan.batch_size_max:
        return f"its batch size {plan.size} is above the largest that was seen to fit ({plan.batch_size_max})"
    if settings.fixed and plan.size == settings.batch_size:
        return None
    grid = size_grid(context, settings)
    if plan.size < grid.first or grid.floor(plan.size) != plan.size or plan.batch_size_max > grid.last:
        return f"its batch size {plan.size} (at most {plan.batch_size_max}) is not among those allowed"
    return None


def _from_cache(entry: CachedPlan, prober: Prober, settings: SearchSettings, listener: SearchListener) -> Plan | None:
    """The cached plan, if it holds now: enough memory is free, and the environment is the same or one probe agrees.

    Enough, but not much more than when the plan was made: then the card was crowded, and the search is made again.
    """
    context, chosen = prober.context, entry.plan.chosen_probe()
    named = settings.memory_limit_bytes is not None
    if chosen is None or not entry.has_room(context.limit_bytes, named=named):
        return None
    memory = _figures(context, chosen)
    if entry.environment == fingerprint(context.environment):
        reason = f"cached: {entry.plan.reason}"
        return dataclasses.replace(entry.plan, cached=True, memory=memory, reason=reason, probes=())
    again = _probe(prober, entry.plan.size, listener)
    if not again.fits:
        return None
    reason = f"cached under other versions or settings, verified with one probe: {entry.plan.reason}"
    return dataclasses.replace(entry.plan, cached=True, memory=_figures(context, again), probes=(again,), reason=reason)


def _make_plan(
    found: SearchResult, context: ProbeContext, settings: SearchSettings, identity: dict[str, Any] | None
) -> Plan:
    notes = [*context.notes, *found.notes]
    if context.used_by_others_bytes:
        notes.append(f"other processes hold {format_bytes(context.used_by_others_bytes)} on {context.device}")
    return Plan(
        unit=context.unit,
        size=found.chosen.batch_size,
        batch_size_max=found.largest,
        batch_size_max_estimate=found.largest_estimate,
        objective=settings.objective,
        reason=found.reason,
        cached=False,
        device=context.device,
        memory=_figures(context, found.chosen),
        probes=tuple(found.probes),
        fingerprint=fingerprint(identity) if identity is not None else None,
        notes=tuple(notes),
    )


def _figures(context: ProbeContext, chosen: Probe) -> MemoryFigures:
    used = chosen.peak_reserved_bytes
    return MemoryFigures(
        limit_bytes=context.limit_bytes,
        headroom_bytes=None if used is None else context.limit_bytes - used,
        used_by_others_bytes=context.used_by_others_bytes,
    )


def _agreed(own: Plan, plans: list[Plan], *, keep_own: bool) -> Plan:
    """This rank's plan, with the size that all ranks share: the smallest, unless each keeps its own."""
    sizes = tuple(plan.size for plan in plans)
    if keep_own:
        return dataclasses.replace(own, batch_sizes_per_rank=sizes)
    if len({plan.unit for plan in plans}) > 1:
        raise BrimError("ranks planned in different units; give every rank the same workload")
    smallest = min(sizes)
    reason = own.reason
    if smallest < own.size:
        reason = f"rank {sizes.index(smallest)} can take {smallest}, and all ranks use the smallest (here: {reason})"
    return dataclasses.replace(
        own,
        size=smallest,
        batch_size_max=min(plan.batch_size_max for plan in plans),
        batch_sizes_per_rank=sizes,
        reason=reason,
    )
