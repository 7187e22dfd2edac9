"""The one way to a forecast before work begins: what any number of samples would reserve, or nothing; never an error.

Only on CUDA, whose allocator a forecast is about. A workload that cannot be traced costs the start nothing but the
lead that a forecast gives, and a note says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from brim.errors import first_line
from brim.forecasting.events import Target, Trace
from brim.forecasting.forecast import Forecaster, TracedWorkload, gpu_of_device
from brim.forecasting.gpus import Gpu
from brim.forecasting.trace import trace_workload
from brim.forecasting.untraceable import UntraceableError
from brim.sizing.priors import ForecastCurve
from brim.workloads.base import Workload

__all__ = ["forecast_curve"]


def forecast_curve(
    workload: Workload,
    *,
    gpu: Gpu | None = None,
    one_step: bool = False,
    seconds: float | None = None,
    begun: str = "searched",
) -> tuple[ForecastCurve | None, tuple[str, ...]]:
    """The forecast, or None; and notes for the user.

    `gpu` is a card to forecast for in place of the workload's own device. With `one_step` nothing outlives a step, so
    that one is traced, and never run for real; with `seconds` a trace that takes longer is given up. `begun` is the
    word for what is done without a forecast.
    """
    if gpu is None and workload.device.type != "cuda":
        return None, ()
    try:
        with _given_up_after(seconds):
            traced = TracedWorkload(workload, _trace_one_step if one_step else None)
            forecaster = Forecaster(traced, gpu or gpu_of_device(workload.device))
            model = forecaster.model()
            smallest = model.replayed(workload.smallest_size())
    except Exception as error:  # the user's step on tensors without data: it may raise anything
        return None, (f"{begun} without a forecast, since the step cannot be traced: {first_line(error)}",)
    if not model.simulated or smallest.reserved_bytes <= 0:
        return None, ()
    forecast = ForecastCurve(
        reserved_at=lambda size: model.replayed(size).reserved_bytes,
        allocated_at=lambda size: model.replayed(size).allocated_bytes,
        runs_within=model.runs_within,
    )
    return forecast, ()


def _trace_one_step(workload: Workload, size: int, target: Target | None) -> Trace:
    return trace_workload(workload, size, target=target, steps=1, or_approximately=False)


@contextlib.contextmanager
def _given_up_after(seconds: float | None) -> Iterator[None]:
    """An `UntraceableError` in the forward of whatever module comes next, once the time is up."""
    if seconds is None:
        yield
        return
    end = time.perf_counter() + seconds

    def check(*_: Any) -> None:
        if time.perf_counter() > end:
            raise UntraceableError(f"it takes more than {seconds:g} seconds")

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
