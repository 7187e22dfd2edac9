"""Evaluations: a model, a data set, a task and its metrics, every sample once.

The package can be called: `brim.evaluate(model, data)` is `brim.evaluate.api.evaluate`, whichever of the two was
imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that is also the function it is known for."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from brim.evaluate.api import evaluate

        return evaluate(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
