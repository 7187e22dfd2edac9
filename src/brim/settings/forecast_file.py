"""Files of `brim forecast --file`: several workloads by name, each with the settings of a forecast.

    defaults:
      gpu: a100-80gb
      allow: 3%
    workloads:
      resnet-train: {model: resnet18, mode: train, batch_size: 64}
      our-model: {model: "py:model.py:build", allow: 64MiB}

Every problem of a file is reported at once, with its line. Does not know what is done with a workload.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.caller import named_as
from brim.settings.declare import Declared, declared, read_settings, settings_at
from brim.settings.forecast_settings import Allowance, ForecastSettings, read_allowance
from brim.settings.problems import Problem, raise_errors
from brim.settings.yaml_file import Document, read_yaml

__all__ = ["FILE_SECTIONS", "NamedForecast", "forecast_file_settings", "read_forecast_file"]

FILE_SECTIONS = {
    "defaults": "Settings of every workload that does not set them itself.",
    "workloads": "Workloads by name, each with the settings of brim forecast.",
}
# What is asked of the whole file, or shown.
_NOT_OF_A_WORKLOAD = (
    "file", "save", "against", "by_module", "markdown", "output", "plot", "table", "gpus", "json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedForecast:
    """One workload of a file; `lines` says where each of its settings stands."""

    name: str
    settings: ForecastSettings
    allow: Allowance | None
    lines: Mapping[str, str]

    def named(self) -> contextlib.AbstractContextManager[None]:
        """While inside, messages name its settings by their lines in the file."""
        return named_as(**self.lines)


def forecast_file_settings() -> tuple[Declared, ...]:
    """The settings that a workload of a file may have."""
    return tuple(
        one
        for one in declared(ForecastSettings)
        if one.setting.only != "python" and one.name not in _NOT_OF_A_WORKLOAD and not one.setting.hidden
    )


def read_forecast_file(file: Path) -> tuple[NamedForecast, ...]:
    """The workloads of a file in its order; a `RequestError` names everything that is wrong with it, line by line."""
    document = read_yaml(file)
    problems = list(_shape_problems(document))
    raise_errors(problems)
    known = forecast_file_settings()
    defaults: tuple[dict[str, Any], dict[str, str]] = ({}, {})
    if document.data.get("defaults"):
        values, lines, problems = settings_at(document, ("defaults",), known)
        problems += _value_problems(document, ("defaults",), values, known)
        defaults = ({}, {}) if problems else (values, lines)  # what is wrong there is said once
    found = []
    for name in document.data["workloads"]:
        workload, wrong = _read_workload(document, name, known, defaults)
        problems += wrong
        found += [] if workload is None else [workload]
    raise_errors(problems)
    return tuple(found)


def _shape_problems(document: Document) -> list[Problem]:
    """What is wrong before any setting is read: sections that are missing, unknown or no mappings."""
    problems = []
    for key in document.data:
        if key not in FILE_SECTIONS:
            message = f"there is no such section{nearest_names(key, FILE_SECTIONS)}"
            problems.append(_problem(document, (key,), message, "a file has defaults and workloads"))
    defaults, workloads = document.data.get("defaults"), document.data.get("workloads")
    if defaults is not None and not isinstance(defaults, Mapping):
        problems.append(_problem(document, ("defaults",), "it must be settings, KEY: VALUE"))
    if not isinstance(workloads, Mapping) or not workloads:
        message = "there is no workload" if not workloads else "it must be workloads by name"
        problems.append(_problem(document, ("workloads",), message, "write NAME: {model: resnet18, gpu: t4} under it"))
        return problems
    for name, one in workloads.items():
        if not isinstance(one, Mapping):
            message = "it must be the settings of a workload"
            problems.append(
                _problem(document, ("workloads", name), message, "write model: resnet18 and others under it")
            )
    return problems


def _read_workload(
    document: Document,
    name: str,
    known: tuple[Declared, ...],
    defaults: tuple[dict[str, Any], dict[str, str]],
) -> tuple[NamedForecast | None, list[Problem]]:
    place = ("workloads", name)
    values, lines, problems = settings_at(document, place, known)
    problems += _value_problems(document, place, values, known)
    if problems:
        return None, problems
    own = set(values)
    values, lines = {**defaults[0], **values}, {**defaults[1], **lines}
    for card, other in (("memory", "gpu"), ("gpu", "memory")):
        if card in own and other not in own:  # a card of its own, instead of that of the defaults
            values.pop(other, None)
    allow = values.pop("allow", None)
    keys = {one.name: one.name for one in known}
    try:
        with named_as(**keys):
            settings = read_settings(ForecastSettings, values)
    except RequestError as error:
        return None, [_problem(document, place, str(error))]
    allowed = None if allow is None else read_allowance(allow)
    return NamedForecast(name=name, settings=settings, allow=allowed, lines={**keys, **lines}), []


def _value_problems(
    document: Document, place: tuple[str, ...], values: Mapping[str, Any], known: tuple[Declared, ...]
) -> list[Problem]:
    """Values that are wrong by themselves, each with its line."""
    problems = []
    settings = {one.name: one for one in known}
    keys = {key.replace("-", "_"): key for key in _section(document, place)}
    for name, value in values.items():
        try:
            settings[name].setting.check(value)
        except ValueError as error:
            written = _section(document, place).get(keys.get(name, name), value)
            problems.append(_problem(document, (*place, keys.get(name, name)), f"{written}: {error}"))
    return problems


def _section(document: Document, place: tuple[str, ...]) -> Mapping[str, Any]:
    section: Any = document.data
    for part in place:
        section = section[part]
    found: Mapping[str, Any] = section
    return found


def _problem(document: Document, place: tuple[str, ...], message: str, fix: str = "") -> Problem:
    return Problem(
        severity="error", file=document.file, line=document.line(*place), key=".".join(place), message=message, fix=fix
    )
