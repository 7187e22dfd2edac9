"""Forecasts kept on disk, so that a preview and the sweep after it trace a model once.

Kept are those that depend on nothing but the settings, the card and the versions: library models on built-in clips, or
on data whose folder has not changed since. Python factories and forecasts for the host's own memory are made anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from brim.settings.nested_keys import flatten
from brim.storage.files import cache_folder, read_json, write_json
from brim.storage.fingerprint import fingerprint
from brim.sweeps.forecasts import Ask, workload_key

__all__ = ["CachedForecasts"]

_FORMAT = 2  # of what is kept: 2 since samples are prepared outside of the trace
_PACKAGES = ("brim", "torch", "torchvision", "timm", "transformers")


class CachedForecasts:
    """As the function it is given, but looks first whether the answer is known; `card` says what it is forecast for."""

    def __init__(self, ask: Ask, *, card: Mapping[str, Any], folder: Path | None = None) -> None:
        self._ask = ask
        self._card = dict(card)
        self._folder = folder or cache_folder() / "sweep-forecasts"

    def __call__(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> Mapping[str, Any]:
        """By the text of each size, its forecast."""
        key = self._key(settings)
        if key is None:
            return self._ask(settings, sizes)
        path = self._folder / f"{key}.json"
        stored: Any = read_json(path)
        known: dict[str, Any] = stored if isinstance(stored, dict) else {}
        missing = [size for size in sizes if str(size) not in known]
        if not missing:
            return known
        answer = self._ask(settings, missing)
        fresh = {str(size): answer[str(size)] for size in missing if str(size) in answer}
        if not fresh:
            return answer
        write_json(path, {**known, **fresh})
        return {**known, **answer}

    def _key(self, settings: Mapping[str, Any]) -> str | None:
        """The name of the entry; None for what is not kept."""
        flat = flatten(settings)
        root = flat.get("data.root")
        own = any(str(flat.get(key) or "").startswith("py:") for key in ("model.type", "data.type"))
        if own or not self._card or flat.get("training.device") == "cpu":
            return None
        limits = {key: flat.get(key) for key in ("training.memory_limit", "training.margin", "hp.effective_batch")}
        return fingerprint(
            {
                "format": _FORMAT,
                "workload": workload_key(settings),
                "limits": limits,
                "data": None if root is None else _state(Path(str(root))),
                "card": self._card,
                "allocator": [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
                "versions": {name: _version(name) for name in _PACKAGES},
            }
        )


def _state(path: Path) -> list[Any]:
    """Where data lies and when it last changed, as far as its own entry tells."""
    try:
        found = path.stat()
    except OSError:
        return [str(path)]
    return [str(path.absolute()), found.st_mtime_ns, found.st_size]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
