"""brim: fill the GPU to the brim, never spill.

Finds the fastest batch size that fits, and evaluates at it. Names are loaded on first use, so that `import brim` stays
free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brim.config.search_settings import SearchSettings
    from brim.errors import BrimError, DoesNotFitError, LostError, RankError, RequestError
    from brim.evaluation.api import evaluate
    from brim.evaluation.run import EvalResult
    from brim.execute.executor import ItemFailure
    from brim.execute.mapping import MapResult, map
    from brim.records import MemoryFigures, Plan, Probe
    from brim.search.find import SearchListener, find_batch_size, find_plan
    from brim.workloads.base import Workload

__version__ = "0.1.0"

_HOMES = {
    "BrimError": "brim.errors",
    "DoesNotFitError": "brim.errors",
    "EvalResult": "brim.evaluation.run",
    "ItemFailure": "brim.execute.executor",
    "LostError": "brim.errors",
    "MapResult": "brim.execute.mapping",
    "MemoryFigures": "brim.records",
    "Plan": "brim.records",
    "Probe": "brim.records",
    "RankError": "brim.errors",
    "RequestError": "brim.errors",
    "SearchListener": "brim.search.find",
    "SearchSettings": "brim.config.search_settings",
    "Workload": "brim.workloads.base",
    "evaluate": "brim.evaluation.api",
    "find_batch_size": "brim.search.find",
    "find_plan": "brim.search.find",
    "map": "brim.execute.mapping",
}

__all__ = [
    "BrimError",
    "DoesNotFitError",
    "EvalResult",
    "ItemFailure",
    "LostError",
    "MapResult",
    "MemoryFigures",
    "Plan",
    "Probe",
    "RankError",
    "RequestError",
    "SearchListener",
    "SearchSettings",
    "Workload",
    "__version__",
    "evaluate",
    "find_batch_size",
    "find_plan",
    "map",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
