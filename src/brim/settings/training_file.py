"""One training run's file, checked: the nested settings that `train_settings` takes, each problem with its line.

As a sweep's file, without a grid: the same keys, the same overrides, EasyTrain's spellings too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from brim.settings.nested_keys import nest
from brim.settings.overrides import parse_overrides
from brim.settings.problems import Problem, has_errors, raise_errors, strictly
from brim.settings.sweep_reader import SweepReader
from brim.settings.sweep_settings import CheckModel
from brim.settings.train_settings import IGNORED_KEYS, setting_problems
from brim.settings.yaml_file import inspect_yaml

__all__ = ["inspect_training_file", "read_training_file"]

_OF_A_SWEEP = ("grid_search", "grid", "models_to_train", "max_experiments", "results_file")


def read_training_file(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    check_model: CheckModel | None = None,
    strict: bool = False,
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The settings as nested keys, and the warnings and notes; a `RequestError` names everything that is wrong."""
    settings, problems = inspect_training_file(path, overrides=overrides, check_model=check_model)
    raise_errors(strictly(problems) if strict else problems)
    assert settings is not None  # without an error there are some
    return settings, problems


def inspect_training_file(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    check_model: CheckModel | None = None,
) -> tuple[dict[str, Any] | None, tuple[Problem, ...]]:
    """The settings and every problem; no settings where one of them is an error. A list that overrides is a value."""
    document, problems = inspect_yaml(path)
    if document is None:
        return None, problems
    changes = dict(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)
    for key in (*document.data, *changes):
        if key.partition(".")[0] in _OF_A_SWEEP:
            message = "this is of a sweep's file, not of a training run's"
            line = document.line(key)
            wrong = Problem(
                severity="error", message=message, fix="run it with brim sweep", file=document.file, line=line, key=key
            )
            return None, (*problems, wrong)
    reader = SweepReader(document, check_model=check_model)
    spec = reader.read(changes, sweeping=False)
    settings = nest(spec.shared if spec.finish is None else spec.finish(spec.shared))
    problems = (*problems, *reader.problems)
    if reader.device_ids is not None:
        message = f"brim does not need it: {IGNORED_KEYS['gpu']}"
        line = document.line_of("gpu.device_ids")
        problems = (
            *problems,
            Problem(severity="note", message=message, file=document.file, line=line, key="gpu.device_ids"),
        )
    if has_errors(problems):
        return None, problems
    for wrong_setting in setting_problems(settings):
        file, line = reader.origins.find(wrong_setting.key, None, None)
        problems = (
            *problems,
            Problem(severity="error", message=wrong_setting.message, file=file, line=line, key=wrong_setting.key),
        )
    return (None if has_errors(problems) else settings), problems
