"""brim: fill the GPU to the brim, never spill.

Finds the fastest batch size that fits, and evaluates at it. Names are loaded on first use, so that `import brim` stays
free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brim.errors import BrimError, DoesNotFitError, LostError, RankError, RequestError
    from brim.evaluation.api import evaluate
    from brim.evaluation.run import EvalResult
    from brim.forecasting.forecast import forecast_batch_size, forecast_memory
    from brim.profiling.api import profile_knob
    from brim.profiling.run import ProfileResult
    from brim.records import Forecast, MemoryFigures, Plan, Probe
    from brim.running.executor import ItemFailure
    from brim.running.mapping import MapResult, map
    from brim.searching.find import SearchListener, find_batch_size, find_plan
    from brim.settings.search_settings import SearchSettings
    from brim.settings.sweep_file import expand_grid, validate_grid
    from brim.training.api import fit
    from brim.training.run import TrainResult
    from brim.workloads.base import Workload

__version__ = "0.1.0"

_HOMES = {
    "BrimError": "brim.errors",
    "DoesNotFitError": "brim.errors",
    "EvalResult": "brim.evaluation.run",
    "Forecast": "brim.records",
    "ItemFailure": "brim.running.executor",
    "LostError": "brim.errors",
    "MapResult": "brim.running.mapping",
    "MemoryFigures": "brim.records",
    "Plan": "brim.records",
    "Probe": "brim.records",
    "ProfileResult": "brim.profiling.run",
    "RankError": "brim.errors",
    "RequestError": "brim.errors",
    "SearchListener": "brim.searching.find",
    "SearchSettings": "brim.settings.search_settings",
    "TrainResult": "brim.training.run",
    "Workload": "brim.workloads.base",
    "evaluate": "brim.evaluation.api",
    "expand_grid": "brim.settings.sweep_file",
    "find_batch_size": "brim.searching.find",
    "find_plan": "brim.searching.find",
    "fit": "brim.training.api",
    "forecast_batch_size": "brim.forecasting.forecast",
    "forecast_memory": "brim.forecasting.forecast",
    "map": "brim.running.mapping",
    "profile_knob": "brim.profiling.api",
    "validate_grid": "brim.settings.sweep_file",
}

__all__ = [
    "BrimError",
    "DoesNotFitError",
    "EvalResult",
    "Forecast",
    "ItemFailure",
    "LostError",
    "MapResult",
    "MemoryFigures",
    "Plan",
    "Probe",
    "ProfileResult",
    "RankError",
    "RequestError",
    "SearchListener",
    "SearchSettings",
    "TrainResult",
    "Workload",
    "__version__",
    "evaluate",
    "expand_grid",
    "find_batch_size",
    "find_plan",
    "fit",
    "forecast_batch_size",
    "forecast_memory",
    "map",
    "profile_knob",
    "validate_grid",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
