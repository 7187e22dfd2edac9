"""A forecast to start from: what any size would reserve and whether a limit bears it, or nothing; never an error.

Only on CUDA, whose allocator a forecast is about. A workload that cannot be traced costs the start nothing but the
lead that a forecast gives, and that is said.
"""

from __future__ import annotations

from brim.errors import first_line
from brim.forecasting.forecast import Forecaster, TracedWorkload, TraceFunction, gpu_of_device
from brim.forecasting.forecast_curve import ForecastCurve
from brim.forecasting.gpus import Gpu
from brim.workloads.base import Workload

__all__ = ["start_forecast"]


def start_forecast(
    workload: Workload, *, gpu: Gpu | None = None, trace: TraceFunction | None = None, begun: str = "searched"
) -> tuple[ForecastCurve | None, tuple[str, ...]]:
    """The forecast, or None; and what the user should be told.

    `gpu` is a card to forecast for in place of the workload's own device, `trace` another way to trace, and `begun` the
    word for what goes on without a forecast.
    """
    if gpu is None and workload.device.type != "cuda":
        return None, ()
    try:
        forecaster = Forecaster(TracedWorkload(workload, trace), gpu or gpu_of_device(workload.device))
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
