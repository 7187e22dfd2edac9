"""brim: fill the GPU to the brim, never spill.

Finds the fastest batch size that fits, and evaluates, profiles and trains at it: `brim.find`, `brim.forecast`,
`brim.map`, `brim.evaluate`, `brim.profile`, `brim.train`, `brim.sweep`, `brim.watch`, `brim.check`, `brim.advise`,
`brim.report`, `brim.doctor`, and for molecules `brim.ood` and `brim.encode`, each with the settings of its command.
Names are loaded on first use, so that `import brim` stays free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brim.advice.advise import AdviceResult
    from brim.advice.checks import CheckResult
    from brim.api import (
        advise,
        check,
        doctor,
        encode,
        evaluate,
        find,
        forecast,
        ood,
        profile,
        report,
        sweep,
        train,
        watch,
    )  # fmt: skip
    from brim.api import profile as profile_knob
    from brim.api import train as fit
    from brim.diagnosis.examine import DoctorResult
    from brim.errors import BrimError, DoesNotFitError, LostError, RankError, RequestError
    from brim.evaluation.run import EvalResult
    from brim.forecasting.forecast import forecast_batch_size, forecast_memory
    from brim.molecules.encoding import EncodedFile
    from brim.molecules.run import OodResult
    from brim.monitor.snapshot import Snapshot
    from brim.planning.find import find_batch_size
    from brim.planning.forecast import ForecastResult
    from brim.planning.forecast_check import ForecastCheck
    from brim.profiling.run import ProfileResult
    from brim.records import Forecast, MemoryFigures, ModuleBytes, Plan, Probe
    from brim.reporting.write import ReportResult
    from brim.running.executor import ItemFailure
    from brim.running.mapping import MapResult, map
    from brim.searching.find import SearchListener, find_plan
    from brim.settings.config_files import expand_grid, validate_grid
    from brim.settings.find_settings import SearchSettings
    from brim.sweeps.run import SweepResult
    from brim.training.run import TrainResult
    from brim.workloads.base import Workload

__version__ = "0.1.0"

_HOMES = {
    "AdviceResult": "brim.advice.advise",
    "BrimError": "brim.errors",
    "CheckResult": "brim.advice.checks",
    "DoctorResult": "brim.diagnosis.examine",
    "DoesNotFitError": "brim.errors",
    "EncodedFile": "brim.molecules.encoding",
    "EvalResult": "brim.evaluation.run",
    "Forecast": "brim.records",
    "ForecastCheck": "brim.planning.forecast_check",
    "ForecastResult": "brim.planning.forecast",
    "ItemFailure": "brim.running.executor",
    "LostError": "brim.errors",
    "MapResult": "brim.running.mapping",
    "MemoryFigures": "brim.records",
    "ModuleBytes": "brim.records",
    "OodResult": "brim.molecules.run",
    "Plan": "brim.records",
    "Probe": "brim.records",
    "ProfileResult": "brim.profiling.run",
    "RankError": "brim.errors",
    "ReportResult": "brim.reporting.write",
    "RequestError": "brim.errors",
    "SearchListener": "brim.searching.find",
    "SearchSettings": "brim.settings.find_settings",
    "Snapshot": "brim.monitor.snapshot",
    "SweepResult": "brim.sweeps.run",
    "TrainResult": "brim.training.run",
    "Workload": "brim.workloads.base",
    "advise": "brim.api",
    "check": "brim.api",
    "doctor": "brim.api",
    "encode": "brim.api",
    "evaluate": "brim.api",
    "expand_grid": "brim.settings.config_files",
    "find": "brim.api",
    "find_batch_size": "brim.planning.find",
    "find_plan": "brim.searching.find",
    "fit": "brim.api",
    "forecast": "brim.api",
    "forecast_batch_size": "brim.forecasting.forecast",
    "forecast_memory": "brim.forecasting.forecast",
    "map": "brim.running.mapping",
    "ood": "brim.api",
    "profile": "brim.api",
    "profile_knob": "brim.api",
    "report": "brim.api",
    "sweep": "brim.api",
    "train": "brim.api",
    "validate_grid": "brim.settings.config_files",
    "watch": "brim.api",
}
_OLDER = {"fit": "train", "profile_knob": "profile"}  # names of before

__all__ = [
    "AdviceResult",
    "BrimError",
    "CheckResult",
    "DoctorResult",
    "DoesNotFitError",
    "EncodedFile",
    "EvalResult",
    "Forecast",
    "ForecastCheck",
    "ForecastResult",
    "ItemFailure",
    "LostError",
    "MapResult",
    "MemoryFigures",
    "ModuleBytes",
    "OodResult",
    "Plan",
    "Probe",
    "ProfileResult",
    "RankError",
    "ReportResult",
    "RequestError",
    "SearchListener",
    "SearchSettings",
    "Snapshot",
    "SweepResult",
    "TrainResult",
    "Workload",
    "__version__",
    "advise",
    "check",
    "doctor",
    "encode",
    "evaluate",
    "expand_grid",
    "find",
    "find_batch_size",
    "find_plan",
    "fit",
    "forecast",
    "forecast_batch_size",
    "forecast_memory",
    "map",
    "ood",
    "profile",
    "profile_knob",
    "report",
    "sweep",
    "train",
    "validate_grid",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    return getattr(importlib.import_module(home), _OLDER.get(name, name))


def __dir__() -> list[str]:
    return __all__
