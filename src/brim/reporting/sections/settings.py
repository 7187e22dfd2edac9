"""How to repeat a run: the command, what was asked, and under which versions and switches it ran."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from brim.reporting.base import Column, Section, Table
from brim.reporting.read import Run
from brim.reporting.units import date_text, duration_text, text
from brim.settings.eval_settings import EvalRequest
from brim.settings.profile_settings import SEED_SCALE, ProfileRequest

__all__ = ["command_of", "flat_rows", "settings_sections"]

# Fields of a request whose flag is not their own name.
_FLAGS = {
    "model": "-m", "data": "-d", "output": "-o", "batch_size": "-b", "memory_limit_bytes": "--memory-limit",
    "fixed": "--no-auto-batch-size", "probe_timeout_seconds": "--probe-timeout", "max_new_tokens": "--max-tokens",
    "max_size": "--max-batch-size",
}  # fmt: skip
_REPEATED = {"mapping": "--map", "knobs": "--knob"}
_LISTED = {"stop": "--stop", "plugins": "--plugin"}
_SWITCHED_OFF = {"pin_memory": "--no-pin-memory", "use_cache": "--no-cache", "chat": "--no-chat"}
_NOT_FLAGS = ("command", "argv", "resume")
_OF_A_SEARCH: dict[str, Any] = {"optimizer": "adamw", "objective": "fastest", "tolerance": 0.02, "multiple_of": 1}


def settings_sections(run: Run) -> tuple[Section, ...]:
    """The command, the settings, the environment."""
    document = run.document
    took = (
        f"Started {date_text(document.get('started_at'))}, ended {date_text(document.get('ended_at'))}, "
        f"took {duration_text(document.get('duration_seconds'))}."
    )
    typed = isinstance(run.request.get("argv"), list)
    source = "as it was typed" if typed else "put together from the settings that the run kept"
    asked = flat_rows(run.request, leave_out=("argv",))
    words = (Column(title="setting", field="name", words=True), Column(title="value", field="value", words=True))
    return (
        Section(
            title="How to repeat it",
            paragraphs=(took, f"The command, {source}:"),
            command=command_of(run.request, kind=run.kind),
            table=Table(caption="Settings", columns=words, rows=asked) if asked else None,
        ),
        Section(
            title="Environment",
            table=Table(caption="Versions and switches", columns=words, rows=flat_rows(run.environment)),
            table_open=True,
        ),
    )


def flat_rows(document: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Name and value of all that is set, in the document's order; what is inside a mapping is named by its path."""
    rows: list[dict[str, str]] = []
    for name, value in document.items():
        if name in leave_out or value is None or value in ("", [], {}):
            continue
        if isinstance(value, dict):
            rows += [{"name": f"{name}.{row['name']}", "value": row["value"]} for row in flat_rows(value)]
        elif isinstance(value, list):
            rows.append({"name": name, "value": ", ".join(text(one) for one in value)})
        else:
            rows.append({"name": name, "value": text(value)})
    return rows


def command_of(request: Mapping[str, Any], *, kind: str) -> str:
    """The command line that asks the same: as it was typed where the run kept it, else made from the request."""
    typed = request.get("argv")
    if isinstance(typed, list) and typed:
        return shlex.join(str(part) for part in typed)
    command = str(request.get("command") or kind)
    parts = ["brim", command]
    defaults = _defaults()
    for field, value in request.items():
        if field in _NOT_FLAGS or value is None or value in ("", [], (), {}) or value == defaults.get(field):
            continue
        if value is False and field not in _SWITCHED_OFF:  # a switch of the library's own, which no flag turns off
            continue
        parts += _flag_parts(field, value, bare_model=command == "find")
    return shlex.join(parts)


def _defaults() -> dict[str, Any]:
    """What a request holds though nobody asked for it, as its JSON has it."""
    values = dict(_OF_A_SEARCH)
    for request in (EvalRequest, ProfileRequest):
        values |= {
            one.name: one.default for one in dataclasses.fields(request) if one.default is not dataclasses.MISSING
        }
    values["initial_scale"] = [[None if up_to == math.inf else up_to, scale] for up_to, scale in SEED_SCALE]
    return values


def _flag_parts(field: str, value: Any, *, bare_model: bool) -> list[str]:
    flag = _FLAGS.get(field, "--" + field.replace("_", "-"))
    if field == "model" and bare_model:
        return [str(value)]
    if field in _SWITCHED_OFF and value is False:
        return [_SWITCHED_OFF[field]]
    if value is True:
        return [flag]
    if field in _OF_A_PROFILE:
        try:
            return _OF_A_PROFILE[field](value)
        except (AttributeError, KeyError, TypeError, ValueError):  # a request that no profile wrote
            return [flag, _written(value)]
    if isinstance(value, dict):
        flag = _REPEATED.get(field, flag)
        return [part for name, one in value.items() for part in (flag, f"{name}={_written(one)}")]
    if field in _LISTED and isinstance(value, list | tuple):
        return [part for one in value for part in (_LISTED[field], str(one))]
    return [flag, _written(value)]


def _axes_parts(axes: Any) -> list[str]:
    named = [name if not values else f"{name}={_written(list(values))}" for name, values in axes.items()]
    return [part for axis in named for part in ("--knob", axis)]


def _scale_parts(steps: Any) -> list[str]:
    named = [f"{scale:g}" if up_to is None else f"{up_to:g}={scale:g}" for up_to, scale in steps]
    return ["--initial-scale", ",".join(named)]


def _size_parts(sizes: Any) -> list[str]:
    parts = []
    for one in sizes:
        point = ",".join(f"{name}={value}" if name else str(value) for name, value in one["point"].items())
        parts += ["--batch-size-for", f"{point}={one['batch_size']}"]
    return parts


_OF_A_PROFILE: dict[str, Callable[[Any], list[str]]] = {
    "axes": _axes_parts,
    "initial_scale": _scale_parts,
    "batch_size_for": _size_parts,
}


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_written(one) for one in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
