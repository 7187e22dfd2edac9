"""How large an evaluation's batches may be: where it starts, and the plan it leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from brim.evaluation.forecast_start import ForecastStart, StartForecaster, forecast_start
from brim.evaluation.hint import Hint
from brim.evaluation.subject import Subject
from brim.memory.devices import DeviceMemory
from brim.records import MemoryFigures, Plan, Probe
from brim.running.governor import Governor
from brim.searching.environment import environment_facts
from brim.searching.plan_cache import PlanCache, beyond_evidence
from brim.searching.probe import device_name
from brim.settings.eval_settings import EvalRequest
from brim.storage.fingerprint import fingerprint

__all__ = ["Sizing", "Start"]

FIRST_ITEMS = 2  # how many of the dearest samples the first batch holds
FEWEST_BATCHES = 4  # a size that would leave fewer batches than this is not looked for
SMALLER_LIMIT = 0.9  # a cached plan was made for another card if less than this of its limit is left
MOST_OFF = 2.0  # a forecast that its first batch shows to be off by more than this factor is forgotten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The governor that a run starts with, and what it was told: a cached plan, or a forecast, or neither."""

    governor: Governor
    cached: Plan | None = None
    forecast: ForecastStart | None = None
    notes: tuple[str, ...] = ()  # a cached plan that was ignored

    @property
    def by_forecast(self) -> bool:
        """Whether the first size is a forecast's."""
        return self.forecast is not None and self.forecast.bytes is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizing:
    """Batch sizes of one run: a ceiling in samples that the user gave, or a cost cap that brim finds as it goes.

    `forecast` is asked for bytes where nothing better is known of the size to start at.
    """

    request: EvalRequest
    subject: Subject
    memory: DeviceMemory
    limit_bytes: int
    hint: Hint = dataclasses.field(default_factory=Hint)
    forecast: StartForecaster = forecast_start

    @property
    def by_count(self) -> bool:
        """Whether the cap counts samples: the user gave a number of them."""
        return self.request.batch_size is not None

    def start(self, items: list[int]) -> Start:
        """Where the run starts: at the size asked for, at that of a cached plan, or where a climb begins."""
        size = self.request.batch_size
        if size is not None:
            first = size if self.request.fixed else self._first_guess(size, items)
            return Start(governor=Governor(first=first, ceiling=size, grows=False, limit_bytes=self.limit_bytes))
        cap = self.request.cost_cap
        if cap is not None:
            return Start(governor=Governor(first=cap, ceiling=cap, grows=False, limit_bytes=self.limit_bytes))
        plan, notes = self._cached()
        if plan is not None:
            return Start(governor=Governor(first=plan.size, cap_known=True, limit_bytes=self.limit_bytes), cached=plan)
        return dataclasses.replace(self._climb(items), notes=notes)

    def _climb(self, items: list[int]) -> Start:
        """From a few samples, or as many as a forecast or a similar run says, to where larger batches no longer pay."""
        costs = [self.subject.costs[item] for item in items]
        dearest = max(costs, default=1)
        # With few batches left to make, a larger one has no time to pay for what finding it costs.
        ceiling = max(sum(costs) // FEWEST_BATCHES, FIRST_ITEMS * dearest)
        if self.hint.cost_limit is not None:
            ceiling = min(ceiling, self.hint.cost_limit)
        known = self.hint.knows_bytes_near(dearest)
        forecast = None if known else self.forecast(self.subject, items, self.limit_bytes)
        hint = self.hint if forecast is None else dataclasses.replace(self.hint, forecast=forecast.bytes)
        # The dearest that can be prepared, where a forecast was made: the others never reach the model.
        dearest = hint.forecast.item_cost if hint.forecast is not None else dearest
        resident = self._resident_bytes()
        room = {"limit_bytes": self.limit_bytes, "resident_bytes": resident, "item_cost": dearest}
        if hint.cost_cap is not None:
            fitting = hint.fitting_items(**room)
            likely = hint.cost_cap if fitting is None else min(hint.cost_cap, fitting * dearest)
            first = max(likely, dearest)
        else:
            first = hint.first_items(**room, usual=FIRST_ITEMS) * dearest
        governor = Governor(
            first=first,
            ceiling=ceiling,
            cap_known=hint.cost_cap is not None and hint.is_compared_near(dearest),
            cap_likely=hint.cost_cap is not None,
            limit_bytes=self.limit_bytes,
        )
        governor.model.base_bytes = resident
        if hint.forecast is not None and hint.forecast.grows:
            governor.model.expect(hint.forecast.bytes_at_cost, base_bytes=resident, most_off=MOST_OFF)
        return Start(governor=governor, forecast=forecast)

    def _first_guess(self, ceiling: int, items: list[int]) -> int:
        """Where to start under a ceiling in samples: what fits by the bytes of a similar run, or the rule of thumb."""
        dearest = max((self.subject.costs[item] for item in items), default=1)
        resident = self._resident_bytes()
        fitting = self.hint.fitting_items(self.limit_bytes, resident_bytes=resident, item_cost=dearest)
        if fitting is None:
            return max(round(self.hint.scale * ceiling), 1)
        return min(fitting, ceiling)

    def _resident_bytes(self) -> int:
        """What the model holds, whatever the batch."""
        module = self.subject.model.module
        held = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        return sum(tensor.nbytes for tensor in held)

    def plan(
        self,
        start: Start,
        largest_cost: int,
        peak_reserved_bytes: int | None,
        trials: tuple[Probe, ...] = (),
    ) -> Plan:
        """What the run settled at, to start the next one there."""
        governor, cached = start.governor, start.cached is not None
        unit = "samples" if self.by_count else self.subject.task.unit
        asked = self.by_count or self.request.cost_cap is not None
        reason = "the size asked for" if asked else "grown on the run's own batches while that paid"
        if start.by_forecast:
            reason += ", from a size that a forecast gave"
        headroom = None if peak_reserved_bytes is None else self.limit_bytes - peak_reserved_bytes
        seen_before = 1 if start.cached is None else start.cached.batch_size_max
        return Plan(
            unit=unit,
            size=max(governor.kept, 1),
            batch_size_max=max(largest_cost, seen_before),
            batch_size_max_estimate=governor.model.largest_within(self.limit_bytes),
            objective="fastest",
            reason="a cached plan of an earlier run" if cached else reason,
            cached=cached,
            device=device_name(self.memory.device),
            memory=MemoryFigures(limit_bytes=self.limit_bytes, headroom_bytes=headroom),
            probes=trials,
            fingerprint=fingerprint(self._identity()),
        )

    def remember(self, plan: Plan, governor: Governor) -> None:
        """File the plan, unless the user said otherwise, gave the size, or there was too little data to find one."""
        found = governor.overlaps and governor.kept < governor.ceiling
        if found and self.request.use_cache and not self.by_count and self.request.cost_cap is None:
            PlanCache().save(plan, self._identity(), environment_facts(self.memory.device))

    def _cached(self) -> tuple[Plan | None, tuple[str, ...]]:
        """The plan of an earlier run, if it holds here; and a note on one that is damaged."""
        if not self.request.use_cache:
            return None, ()
        entry, notes = PlanCache().load(self._identity(), self._problem_of)
        if entry is None or entry.environment != fingerprint(environment_facts(self.memory.device)):
            return None, notes
        made_for = entry.plan.memory.limit_bytes or 0
        return (entry.plan if self.limit_bytes >= SMALLER_LIMIT * made_for else None), ()

    def _problem_of(self, plan: Plan) -> str | None:
        if plan.unit != self.subject.task.unit:
            return f"it counts {plan.unit}, and this task {self.subject.task.unit}"
        return beyond_evidence(plan)

    def _identity(self) -> dict[str, Any]:
        limit = self.request.memory_limit_bytes
        task = dict(self.subject.task.identity())
        for volatile in ("system",):
            task.pop(volatile, None)
        return {
            "kind": "eval",
            **self.subject.identity(),
            "task": task,
            "longest": max(self.subject.costs).bit_length(),  # data of another length has another knee
            "device": device_name(self.memory.device),
            "memory_limit": limit,
        }
