"""Schedulers as EasyTrain's files describe them, turned into brim's for one experiment at a time.

There, a grid lists the parameters of all its schedulers, and each takes what it knows; `warmup_cosine` is a scheduler
of its own, and the smallest rate is a factor of the learning rate. Here a scheduler takes exactly its parameters, a
warm-up goes before any of them, and the smallest rate is a rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from brim.settings.train_settings import SETTING_KEYS

__all__ = ["NAME_KEY", "is_foreign_schedule", "settle_schedule"]

NAME_KEY = "scheduler.name"
_PARAMS = "scheduler.params."
_WARMUP_COSINE = "warmup_cosine"
_ONLY_THEIRS = ("warmup_epochs", "warmup_start_factor", "eta_min_factor")
_TAKEN_BY = {  # of the parameters that their files list for all schedulers
    "step": ("step_size", "gamma"),
    "multistep": ("gamma", "milestones"),
    "exponential": ("gamma",),
    "plateau": ("factor", "patience", "mode"),
    "linear": ("start_factor", "end_factor"),
}
_LISTED = {name for names in _TAKEN_BY.values() for name in names}


def is_foreign_schedule(keys: Iterable[str], names: Iterable[Any]) -> bool:
    """Whether a file describes its schedulers so: by these keys, with these names of schedulers."""
    theirs = {f"{_PARAMS}{name}" for name in _ONLY_THEIRS}
    return bool(theirs & set(keys)) or _WARMUP_COSINE in names


def settle_schedule(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one experiment with its scheduler as brim has it; other settings stay as they are."""
    settled = dict(flat)
    params = {name: settled.pop(f"{_PARAMS}{name}", None) for name in (*_ONLY_THEIRS, *_LISTED)}
    name = str(flat.get(NAME_KEY, "none")).lower()
    for taken in _TAKEN_BY.get(name, ()):
        if params[taken] is not None:
            settled[f"{_PARAMS}{taken}"] = params[taken]
    if name not in ("cosine", _WARMUP_COSINE):
        return settled
    factor = params["eta_min_factor"]
    if name == _WARMUP_COSINE:
        settled[NAME_KEY] = "cosine"
        epochs = flat.get("hp.epochs", SETTING_KEYS["hp.epochs"].default)
        warmup = max(1, epochs // 10) if params["warmup_epochs"] is None else params["warmup_epochs"]
        if "scheduler.warmup_steps" not in flat:
            settled.setdefault("scheduler.warmup_epochs", min(warmup, max(epochs - 1, 0)))
        factor = 0.01 if factor is None else factor
    if factor is not None:
        rate = flat.get("hp.learning_rate", SETTING_KEYS["hp.learning_rate"].default)
        settled.setdefault(f"{_PARAMS}eta_min", float(f"{rate * factor:.12g}"))
    return settled
