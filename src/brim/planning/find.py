"""`brim find` and `brim.find`: the fastest batch size for a model by name, on data of its own, or for a step."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import BrimError, RequestError
from brim.evaluation.setup import open_setup
from brim.evaluation.workload import DataWorkload
from brim.memory.weights import load_failure
from brim.models.build import build_workload
from brim.records import Objective, Plan, Unit
from brim.searching.find import SearchListener, find_plan, find_with, probe_settings
from brim.searching.isolate import IsolatedProber
from brim.searching.probe import DeviceProber, Prober, raised_by
from brim.settings.caller import given, named
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import DEFAULT_MAX_SIZE, FindSettings, OwnStep, SearchSettings, WorkloadRequest
from brim.settings.sizes import parse_bytes
from brim.storage.run_folder import check_folder, write_run
from brim.workloads.callables import CallableWorkload

__all__ = ["FoundPlan", "find", "find_batch_size", "find_recorded", "own_workload"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The plan of a search, and what its record says beside it."""

    plan: Plan
    settings: FindSettings
    environment: dict[str, Any]
    started_at: datetime.datetime

    def write(self) -> None:
        """Write `run.json` where the search was asked to."""
        if self.settings.output is None or self.settings.workload is None:
            return
        write_run(
            self.settings.output,
            kind="find",
            request={**self.settings.workload.to_json(), "data": self.settings.on_data.data, "command": "find"},
            environment=self.environment,
            plan=self.plan.to_json(),
            summary={"batch_size_used": self.plan.size, "batch_size_max": self.plan.batch_size_max},
            started_at=self.started_at,
        )


def find(settings: FindSettings, *, listener: SearchListener | None = None) -> FoundPlan:
    """Search as asked; nothing is written yet."""
    started_at = datetime.datetime.now(datetime.UTC)
    if settings.own is not None:
        if settings.output is not None:
            raise RequestError(f"{named('output')}: a run is recorded for a model by name only")
        plan = find_plan(own_workload(settings.own), settings.search, listener=listener)
        return FoundPlan(plan=plan, settings=settings, environment={}, started_at=started_at)
    request = settings.workload
    assert request is not None  # a model by name or a step of one's own, as the settings see to
    evaluation = settings.on_data.request(request)
    if settings.output is not None:
        check_folder(settings.output)
    prober: Prober | None = None
    try:
        prober = _prober(request, evaluation, settings.search, isolate=settings.isolate)
        plan = find_with(prober, settings.search, listener=listener)
        environment = prober.context.environment
    except (BrimError, KeyboardInterrupt):
        raise
    except Exception as error:
        what = "building the workload" if prober is None else prober.stage
        full = load_failure(error, None, what=f"{request.model}: outside of any batch")
        if full is not None:
            raise full from error
        raise RequestError(f"{request.model}: {raised_by(what, error)}") from error
    return FoundPlan(plan=plan, settings=settings, environment=environment, started_at=started_at)


def find_recorded(settings: FindSettings) -> Plan:
    """Search, and write the record where one is asked for."""
    found = find(settings)
    found.write()
    return found.plan


def find_batch_size(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: object = None,
    scheduler: object = None,
    batch_length: Callable[[Any], int] | None = None,
    device: torch.device | str | None = None,
    unit: Unit = "samples",
    key: str | None = None,
    batch_size: int | None = None,
    objective: Objective = "fastest",
    memory_limit: int | str | None = None,
    max_batch_size: int | None = None,
    listener: SearchListener | None = None,
    fixed: bool = False,
    fail_on_oom: bool = False,
    memory_limit_bytes: int | None = None,
    margin: float | None = None,
    tolerance: float = 0.02,
    max_probes: int | None = None,
    probe_timeout_seconds: float | None = None,
    multiple_of: int = 1,
    power_of_two: bool = False,
    max_size: int | None = None,
    use_cache: bool = True,
    per_rank: bool = False,
) -> Plan:
    """The fastest batch size that fits, for a step of your own: `brim.find(step=…)` with the names of before.

    As accelerate's `find_executable_batch_size`, but it needs no starting guess, looks for the fastest size and
    not the first that survives, and leaves weights, buffers, gradients, optimizer state and every random
    generator bit-identical: name what the step changes as `model`, `optimizer`, `scaler`, `scheduler`.

    Args:
        step: Runs once on a batch: a forward, or forward, backward and optimizer step.
        make_batch: Takes n and returns the worst-case batch of n items on the device.
        model: The module or modules that a step changes.
        optimizer: The optimizer or optimizers that a step changes.
        scaler: The gradient scaler that a step changes.
        scheduler: The learning-rate scheduler that a step changes.
        batch_length: Counts the items of a batch that has no leading dimension.
        device: Where the step runs; by default where the model is.
        unit: What a size counts: `samples`, or `tokens`.
        key: Keep the plan on disk under this name; without one it is not kept.
        batch_size: A ceiling, or with `fixed` the very size.
        objective: `fastest` or `largest`.
        memory_limit: Use at most this much, such as `"24GiB"`.
        max_batch_size: The largest size that is tried.
        listener: Is called as the search proceeds.
        fixed: Exactly `batch_size`; split if it does not fit.
        fail_on_oom: With `fixed`: an error instead of a split.
        memory_limit_bytes: `memory_limit` in bytes.
        margin: The fraction of the memory that is kept free.
        tolerance: How close to the best rate is fast enough.
        max_probes: Stop after so many probes, with the best size seen.
        probe_timeout_seconds: A probe that takes longer does not fit.
        multiple_of: Only multiples of this.
        power_of_two: Only powers of two.
        max_size: The older name of `max_batch_size`.
        use_cache: With `key`: use a plan that is kept, and keep this one.
        per_rank: Under torchrun each rank keeps its own training size.

    Returns:
        The plan: `batch_size`, `batch_size_max`, `reason` and the `probes` that it rests on.

    Raises:
        RequestError: The request is wrong; the message names the parameter, its value and what to do.
        DoesNotFitError: Nothing fits, even at the smallest size.
        LostError: The device or a rank was lost.

    Examples:
        >>> model = torch.nn.Linear(256, 256)
        >>> brim.find_batch_size(model, lambda n: torch.randn(n, 256), model=model, memory_limit="16MiB").batch_size
        64
    """
    own = OwnStep(
        step=step, make_batch=make_batch, model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler,
        batch_length=batch_length, unit=unit, device=device, key=key,
    )  # fmt: skip
    largest = max_batch_size if max_batch_size is not None else max_size
    settings = SearchSettings(
        batch_size=batch_size, objective=objective, fixed=fixed, fail_on_oom=fail_on_oom, margin=margin,
        memory_limit_bytes=memory_limit_bytes if memory_limit is None else parse_bytes(memory_limit),
        tolerance=tolerance, max_probes=max_probes, probe_timeout_seconds=probe_timeout_seconds,
        multiple_of=multiple_of, power_of_two=power_of_two, max_size=DEFAULT_MAX_SIZE if largest is None else largest,
        use_cache=use_cache, per_rank=per_rank,
    )  # fmt: skip
    return find_plan(own_workload(own), settings, listener=listener)


def own_workload(own: OwnStep) -> CallableWorkload:
    """The workload of a step of the caller's own."""
    assert own.step is not None
    assert own.make_batch is not None
    return CallableWorkload(
        step=own.step, make_batch=own.make_batch, model=own.model, optimizer=own.optimizer, scaler=own.scaler,
        scheduler=own.scheduler, batch_length=own.batch_length, unit=own.unit, device=own.device, key=own.key,
    )  # fmt: skip


def _prober(
    request: WorkloadRequest, evaluation: EvalRequest | None, settings: SearchSettings, *, isolate: bool
) -> Prober:
    if isolate:
        factory = (
            "brim.models.build:build_from_json" if evaluation is None else "brim.evaluation.workload:build_from_json"
        )
        asked = request if evaluation is None else evaluation
        return IsolatedProber(factory, asked.to_json(), probe_settings(settings))
    if evaluation is not None:
        on_data = DataWorkload(open_setup(evaluation), evaluation)
        if request.mode is not None and request.mode != on_data.mode:
            raise RequestError(
                f"{given('mode', request.mode)}: the task {on_data.task.name} is a {on_data.mode}; leave "
                f"{named('mode')} out"
            )
        return DeviceProber(on_data, probe_settings(settings), preserve_state=False)
    workload, _ = build_workload(request)
    return DeviceProber(workload, probe_settings(settings), preserve_state=False)  # nothing outlives the search
