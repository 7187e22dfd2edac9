"""A forecast for a search to start from: the reserved bytes of any size, or nothing; never an error.

Only on CUDA, whose allocator a forecast is about. A workload that cannot be traced costs the search nothing but
the head start, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable

from brim.forecast.forecast import Forecaster, TracedWorkload, gpu_of_device
from brim.workloads.base import Workload

__all__ = ["forecast_bytes"]


def forecast_bytes(workload: Workload) -> tuple[Callable[[int], int] | None, tuple[str, ...]]:
    """Reserved bytes as a function of the size, or None; and what the user should be told."""
    if workload.device.type != "cuda":
        return None, ()
    try:
        forecaster = Forecaster(TracedWorkload(workload), gpu_of_device(workload.device))
        model = forecaster.model()
        smallest = model.replayed(workload.smallest_size())
    except Exception as error:  # the user's step on tensors without data: it may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, (f"searched without a forecast, since the step cannot be traced: {reason}",)
    if not model.simulated or smallest.reserved_bytes <= 0:
        return None, ()
    return (lambda size: model.replayed(size).reserved_bytes), ()
