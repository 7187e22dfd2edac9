"""`brim.fit`: a whole training run as one call. (`brim.train` is the package that this file lies in.)"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.train_settings import train_settings
from brim.settings.training_file import read_training_file
from brim.training.request import TrainRequest
from brim.training.run import TrainResult, run_training
from brim.training.seeds.run import run_seeds
from brim.training.seeds.variants import seeds_from

__all__ = ["fit"]


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    seeds: int | Sequence[int] | None = None,
    **options: Any,
) -> TrainResult:
    """Train as a file, or a mapping of the same keys, says, and leave the run's folder behind: `brim train` in Python.

        result = brim.fit("config.yaml", overrides={"hp.epochs": 3}, output="runs/first")
        result.metrics["top1"]["mean"], result.summary["micro_batch_size"]
        brim.fit({"model": {"type": "r3d_18"}, "hp": {"effective_batch": 64}})
        brim.fit("config.yaml", seeds=10).metrics["top1"]  # mean, deviation and values

    With `seeds` (how many from hp.seed on, or which) every seed has a folder of its own inside the run's. `options` are
    the fields of `brim.training.request.TrainRequest` beside the settings: fixed, resume, plan, fast_path and others.
    """
    known = {field.name for field in dataclasses.fields(TrainRequest)} - {"settings", "file", "seeds"}
    for name in options:
        if name not in known:
            raise RequestError(f"fit() has no option {name!r}{nearest_names(name, known)}")
    if isinstance(config, Mapping):
        if overrides:
            raise RequestError("fit(): overrides go with a file; change the mapping itself")
        nested, file = dict(config), None
    else:
        nested, _ = read_training_file(config, overrides=overrides or {})
        file = os.fspath(config)
    settings = train_settings(nested)
    chosen = () if seeds is None else seeds_from(seeds, first=settings.hp.seed)
    request = TrainRequest(settings=settings, file=file, seeds=chosen, **_as_tuples(options))
    train = run_seeds if request.several else run_training
    return train(request, output=None if output is None else Path(output))


def _as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
