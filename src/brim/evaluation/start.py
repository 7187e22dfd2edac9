"""Where an evaluation's batches start, and the plan that it leaves behind.

Gathers what `sizing/` decides from: the plan of an earlier run, what a similar run has shown, a forecast. A forecast is
made of the costliest sample, as the run will treat it, where the few seconds are sure to be little beside the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from brim.evaluation.setup import EvaluationSetup
from brim.evaluation.workload import workload_to_trace
from brim.forecasting.forecast import forecast_curve
from brim.forecasting.gpus import Gpu
from brim.memory.devices import DeviceMemory, device_name
from brim.memory.environment import environment_facts
from brim.records import MemoryFigures, Plan, Probe
from brim.running.interrupts import InterruptWatch
from brim.settings.eval_settings import EvalRequest
from brim.sizing.live import LiveSizer
from brim.sizing.plans import PlanFile
from brim.sizing.pool import PoolNeeds, PoolSizer, start_pool
from brim.sizing.priors import (
    AvailableMemory,
    ForecastBytes,
    LiveRequest,
    Prior,
    forecast_pays,
    largest_worth_finding,
    start_live,
)
from brim.storage.fingerprint import fingerprint
from brim.tasks.generate import GenerateTask

__all__ = [
    "FirstForecast",
    "HowSized",
    "MakeForecast",
    "PoolStart",
    "Start",
    "StartingPoint",
    "forecast_first_batch",
    "is_worth_a_trace",
]

LONGEST_TRACE_SECONDS = 3.0  # a trace that takes longer is given up
PREPARED = 8  # of the costliest samples that are tried: one that cannot be prepared never reaches the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstForecast:
    """The bytes to start from, or None and a note that says why; and how long the trace took."""

    bytes: ForecastBytes | None
    seconds: float
    note: str | None = None


# Of a setup, the items to do and the memory limit; None where none is made.
MakeForecast = Callable[[EvaluationSetup, Sequence[int], int], FirstForecast | None]


def forecast_first_batch(
    setup: EvaluationSetup, items: Sequence[int], limit_bytes: int, *, gpu: Gpu | None = None
) -> FirstForecast | None:
    """The bytes of the costliest of these items; None where no forecast is made: not on CUDA, or not worth the time.

    With `gpu` it is made for that card, wherever the model is and however short the run.
    """
    if gpu is None and (setup.device.type != "cuda" or not is_worth_a_trace(setup, items)):
        return None
    started = time.perf_counter()
    item, prepared = _costliest(setup, items)
    workload = None if item is None else workload_to_trace(setup, item, prepared)
    if item is None or workload is None:
        return None
    with InterruptWatch():  # a trace is full of weak references
        curve, notes = forecast_curve(workload, gpu=gpu, one_step=True, seconds=LONGEST_TRACE_SECONDS, begun="started")
    found = None
    if curve is not None:
        cost = setup.costs[item]
        found = ForecastBytes.of_curve(curve, item_cost=cost, limit_bytes=limit_bytes, most=len(items))
    return FirstForecast(bytes=found, seconds=time.perf_counter() - started, note=next(iter(notes), None))


def is_worth_a_trace(setup: EvaluationSetup, items: Sequence[int]) -> bool:
    """Whether a forecast pays for this run."""
    module, task = setup.model.module, setup.task
    if not isinstance(module, nn.Module):
        return False
    return forecast_pays(
        [setup.costs[item] for item in items],
        new_tokens=task.generation.max_new_tokens if isinstance(task, GenerateTask) else None,
        counts_tokens=task.unit == "tokens",
        parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def _costliest(setup: EvaluationSetup, items: Sequence[int]) -> tuple[int | None, Any]:
    """The costliest item that can be prepared, prepared; None if none of the first few can."""
    for item in sorted(items, key=lambda item: -setup.costs[item])[:PREPARED]:
        with contextlib.suppress(Exception):  # the run will meet it again, and record it as this sample's failure
            return item, setup.task.prepare(item)
    return None, None


class HowSized(Protocol):
    """How the size of a run was found, for those who watch."""

    @property
    def size_found(self) -> str:
        """In a few words, as of now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolStart:
    """A pool's size is what fits, by the bytes of the first prompts."""

    given: bool = False  # a ceiling by the user

    @property
    def size_found(self) -> str:
        """How, for those who watch."""
        return "given" if self.given else "by memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The sizer that a run starts with, and what it knew: a cached plan, or a forecast, or neither."""

    sizer: LiveSizer
    cached: Plan | None = None
    forecast: FirstForecast | None = None
    notes: tuple[str, ...] = ()  # a cached plan that was ignored
    given: bool = False  # by the user

    @property
    def size_found(self) -> str:
        """How the size of now was found, for those who watch."""
        if self.given:
            return "given"
        if self.cached is not None:
            return "from a cached plan"
        if self.sizer.settled:
            return "found on this run"
        return "forecast" if self.by_forecast else "searching"

    @property
    def by_forecast(self) -> bool:
        """Whether the first size is a forecast's."""
        return self.forecast is not None and self.forecast.bytes is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """What is known of one run before its first batch; `forecast` is asked where nothing better is known."""

    request: EvalRequest
    setup: EvaluationSetup
    memory: DeviceMemory
    limit_bytes: int
    prior: Prior = dataclasses.field(default_factory=Prior)
    forecast: MakeForecast = forecast_first_batch

    @property
    def by_count(self) -> bool:
        """Whether the size counts samples: the user gave a number of them."""
        return self.request.batch_size is not None

    @property
    def given(self) -> bool:
        """Whether the user gave the size."""
        return self.by_count or self.request.cost_cap is not None

    def start(self, items: list[int]) -> Start:
        """The sizer of a run over these items."""
        request, costs = self.request, [self.setup.costs[item] for item in items]
        item_cost = max(costs, default=1)
        asked = LiveRequest(
            batch_size=request.batch_size,
            cost_cap=request.cost_cap,
            fixed=request.fixed,
            ceiling=largest_worth_finding(costs),
        )
        plan, notes = (None, ()) if self.given else self._plan_file.load()
        if plan is not None:
            return Start(
                sizer=start_live(asked, Prior(known_size=plan.size), self._available_memory(item_cost)), cached=plan
            )
        forecast, prior = None, self.prior
        if not self.given and not prior.knows_bytes_near(item_cost):
            forecast = self.forecast(self.setup, items, self.limit_bytes)
        if forecast is not None and forecast.bytes is not None:
            prior = dataclasses.replace(prior, forecast=forecast.bytes)
            item_cost = forecast.bytes.item_cost  # of the costliest that can be prepared: others never reach the model
        return Start(
            sizer=start_live(asked, prior, self._available_memory(item_cost)), forecast=forecast, notes=notes,
            given=self.given,
        )  # fmt: skip

    def plan(self, start: Start, largest: int, peak_bytes: int | None, trials: tuple[Probe, ...] = ()) -> Plan:
        """What the run settled at, to start the next one there."""
        reason = "the size asked for" if self.given else "found on the run's own batches, raised while the rate rose"
        if start.by_forecast:
            reason += ", from a size that a forecast gave"
        if start.cached is not None:
            reason, largest = "a cached plan of an earlier run", max(largest, start.cached.batch_size_max)
        return self._plan_file.plan(
            start.sizer,
            unit="samples" if self.by_count else self.setup.task.unit,
            size=start.sizer.kept,
            largest=max(largest, 1),
            reason=reason,
            cached=start.cached is not None,
            peak_bytes=peak_bytes,
            probes=trials,
        )

    def pool_sizer(self, needs: PoolNeeds) -> PoolSizer:
        """How large a pool for items with these needs may be."""
        request = self.request
        return start_pool(
            needs, limit_bytes=self.limit_bytes, resident_bytes=self._resident_bytes(),
            most_rows=request.batch_size, most_slots=request.cost_cap,
        )  # fmt: skip

    def pool_plan(self, kv_bytes: int, sizer: PoolSizer, peak_bytes: int | None, trials: tuple[Probe, ...]) -> Plan:
        """What the pool had; nothing is searched, so nothing is filed."""
        reason = "the pool asked for" if self.given else "as many sequences as there are, or as fit"
        return Plan(
            unit="kv_bytes",
            size=max(kv_bytes, 1),
            batch_size_max=max(kv_bytes, 1),
            batch_size_max_estimate=sizer.size.slots * sizer.slot_bytes if sizer.measured else None,
            objective="fastest",
            reason=reason,
            cached=False,
            device=device_name(self.memory.device),
            memory=MemoryFigures(
                limit_bytes=self.limit_bytes,
                headroom_bytes=None if not peak_bytes else self.limit_bytes - peak_bytes,
            ),
            probes=trials,
            fingerprint=fingerprint(self._plan_file.identity),
        )

    def remember(self, plan: Plan, sizer: LiveSizer) -> None:
        """File the plan, unless the user gave the size or there was too little data to find one."""
        if sizer.overlaps and sizer.kept < sizer.ceiling and not self.given:
            self._plan_file.save(plan)

    def _available_memory(self, item_cost: int) -> AvailableMemory:
        return AvailableMemory(limit_bytes=self.limit_bytes, resident_bytes=self._resident_bytes(), item_cost=item_cost)

    def _resident_bytes(self) -> int:
        module = self.setup.model.module
        held = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        return sum(tensor.nbytes for tensor in held)

    @functools.cached_property
    def _plan_file(self) -> PlanFile:
        task = {name: value for name, value in self.setup.task.identity().items() if name != "system"}
        device = device_name(self.memory.device)
        return PlanFile(
            identity={
                "kind": "eval",
                **self.setup.identity(),
                "task": task,
                "longest": max(self.setup.costs).bit_length(),  # data of another length has another knee
                "device": device,
                "memory_limit": self.request.memory_limit_bytes,
            },
            environment=environment_facts(self.memory.device),
            device=device,
            limit_bytes=self.limit_bytes,
            unit=self.setup.task.unit,
            use_cache=self.request.use_cache,
        )
