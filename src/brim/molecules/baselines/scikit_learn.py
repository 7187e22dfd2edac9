"""scikit-learn, loaded on use."""

from __future__ import annotations

import importlib
from typing import Any

from brim.errors import RequestError

__all__ = ["scikit_learn"]


def scikit_learn(module: str) -> Any:
    """A module of scikit-learn; where it is not installed, an error that says how to get it."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise RequestError(f"baselines need scikit-learn ({error}): pip install 'brim[molecules]'") from error
