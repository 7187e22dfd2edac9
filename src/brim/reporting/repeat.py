"""How to repeat a run: the command, what was asked, and under which versions and switches it ran.

Which flag a field of a request is comes from the declarations of the settings.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from brim.advice.run_reader import Run
from brim.reporting.base import PageTable, Section, present, words
from brim.settings.caller import flag_of
from brim.settings.declare import Declared, declared, flag_names
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import SearchSettings, WorkloadRequest
from brim.settings.profile_settings import SEED_SCALE, ProfileRequest
from brim.units import date_text, text

__all__ = ["command_of", "flat_rows", "repeat_sections"]

_NOT_FLAGS = ("command", "argv", "resume")
_REQUESTS = (SearchSettings, WorkloadRequest, EvalRequest, ProfileRequest)


def repeat_sections(run: Run, *, command: str = "", source: str = "") -> tuple[Section, ...]:
    """The command, the settings, the environment; a run that has another command than its request says gives it."""
    document = run.document
    took = (
        f"Started {date_text(document.get('started_at'))}, ended {date_text(document.get('ended_at'))}, "
        f"took {run.duration}."
    )
    typed = isinstance(run.request.get("argv"), list)
    made = (
        "The command, as it was typed:" if typed else "The command, put together from the settings that the run kept:"
    )
    named = (words("setting", "name"), words("value"))
    asked = flat_rows(run.request, leave_out=("argv",))
    versions = PageTable("Versions and switches", named, flat_rows(run.environment))
    return present(
        Section(
            title="How to repeat it",
            paragraphs=(took, source or made),
            command=command or command_of(run.request, kind=run.kind),
            table=PageTable("Settings", named, asked) if asked else None,
            open=False,
        ),
        Section(title="Environment", table=versions) if versions.rows else None,
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
    settings = _settings()
    defaults = _defaults()
    parts = ["brim", command]
    for field, value in request.items():
        if field in _NOT_FLAGS or value is None or value in ("", [], (), {}) or value == defaults.get(field):
            continue
        known = settings.get(field)
        if field == "model" and command == "find":
            parts.append(str(value))
        elif known is None or known.setting.only != "python":
            parts += _flag_parts(field, value, known)
    return shlex.join(parts)


def _settings() -> dict[str, Declared]:
    """What each field of a request is declared as."""
    found: dict[str, Declared] = {}
    for request in _REQUESTS:
        by_name = {one.name: one for one in declared(request)}
        found |= {field: by_name[name] for field, name in flag_names(request).items()}
    return found


def _defaults() -> dict[str, Any]:
    """What a request holds though nobody asked for it, as its JSON has it."""
    values = {
        one.name: one.default
        for request in _REQUESTS
        for one in dataclasses.fields(request)
        if one.default is not dataclasses.MISSING
    }
    values["initial_scale"] = [[None if up_to == math.inf else up_to, scale] for up_to, scale in SEED_SCALE]
    return values


def _flag_parts(field: str, value: Any, known: Declared | None) -> list[str]:
    """A setting as it is typed; a switch that is off is typed only where the flag turns it off."""
    spelled = known.flags if known is not None else ()
    flag, _, off = (spelled[0] if spelled else flag_of(field)).partition("/")
    if isinstance(value, bool):
        inverted = known is not None and known.setting.inverted
        return [one for one in (flag if value != inverted else off,) if one]
    if field in _OF_A_PROFILE:
        try:
            return _OF_A_PROFILE[field](value)
        except (AttributeError, KeyError, TypeError, ValueError):  # a request that no profile wrote
            return [flag, _written(value)]
    if isinstance(value, dict):
        return [part for key, one in value.items() for part in (flag, f"{key}={_written(one)}")]
    if known is not None and known.setting.many and isinstance(value, list | tuple):
        return [part for one in value for part in (flag, str(one))]
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


# Fields of a profile whose JSON is not what is typed.
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
