"""brim: fill the GPU to the brim, never spill.

Finds the fastest batch size that fits, and evaluates, profiles and trains at it: `brim.find`, `brim.forecast`,
`brim.evaluate`, `brim.lm_eval`, `brim.profile`, `brim.train`, `brim.sweep`, `brim.watch`, `brim.check`, `brim.advise`,
`brim.report`, `brim.doctor`, and for molecules `brim.ood` and `brim.encode`, each with the settings of its command. For
loops of your own: `brim.map`, `brim.batches`, `brim.accumulate`, and `brim.find_executable_batch_size` as accelerate
has it. Names are loaded on first use, so that `import brim` stays free of torch.
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
        lm_eval,
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
    from brim.integrations.accelerate import find_executable_batch_size
    from brim.integrations.harness_work import LmEvalResult
    from brim.molecules.encoding import EncodedFile
    from brim.molecules.run import OodResult
    from brim.monitor.snapshot import Snapshot
    from brim.planning.find import find_batch_size
    from brim.planning.forecast import ForecastResult
    from brim.planning.forecast_check import ForecastCheck
    from brim.profiling.run import ProfileResult
    from brim.records import Forecast, MemoryFigures, ModuleBytes, Plan, Probe
    from brim.reporting.write import ReportResult
    from brim.running.batch_attempt import BatchAttempt
    from brim.running.batches import Batches, batches
    from brim.running.executor import ItemFailure
    from brim.running.mapping import MapResult, map
    from brim.searching.find import SearchListener, find_plan
    from brim.settings.config_files import expand_grid, validate_grid
    from brim.settings.find_settings import SearchSettings
    from brim.sweeps.run import SweepResult
    from brim.training.accumulate import Accumulation, accumulate
    from brim.training.run import TrainResult
    from brim.workloads.base import Workload

__version__ = "0.1.0"

_HOMES = {
    "Accumulation": "brim.training.accumulate",
    "AdviceResult": "brim.advice.advise",
    "BatchAttempt": "brim.running.batch_attempt",
    "Batches": "brim.running.batches",
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
    "LmEvalResult": "brim.integrations.harness_work",
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
    "accumulate": "brim.training.accumulate",
    "advise": "brim.api",
    "batches": "brim.running.batches",
    "check": "brim.api",
    "doctor": "brim.api",
    "encode": "brim.api",
    "evaluate": "brim.api",
    "expand_grid": "brim.settings.config_files",
    "find": "brim.api",
    "find_batch_size": "brim.planning.find",
    "find_executable_batch_size": "brim.integrations.accelerate",
    "find_plan": "brim.searching.find",
    "fit": "brim.api",
    "forecast": "brim.api",
    "forecast_batch_size": "brim.forecasting.forecast",
    "forecast_memory": "brim.forecasting.forecast",
    "lm_eval": "brim.api",
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
    "Accumulation",
    "AdviceResult",
    "BatchAttempt",
    "Batches",
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
    "LmEvalResult",
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
    "accumulate",
    "advise",
    "batches",
    "check",
    "doctor",
    "encode",
    "evaluate",
    "expand_grid",
    "find",
    "find_batch_size",
    "find_executable_batch_size",
    "find_plan",
    "fit",
    "forecast",
    "forecast_batch_size",
    "forecast_memory",
    "lm_eval",
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
