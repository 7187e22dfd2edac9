"""The command line that asks for the same as a run's request, and how a field of a request is typed.

Which flag a field of a request is comes from the declarations of the settings.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from brim.settings.caller import flag_of
from brim.settings.declare import Declared, declared, flag_names
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import SearchSettings, WorkloadRequest
from brim.settings.profile_settings import SEED_SCALE, ProfileRequest

__all__ = ["command_of", "declared_by_field", "flag_parts"]

_NOT_FLAGS = ("command", "argv", "resume")
_REQUESTS = (SearchSettings, WorkloadRequest, EvalRequest, ProfileRequest)


def command_of(request: Mapping[str, Any], *, kind: str) -> str:
    """The command line that asks the same: as it was typed where the run kept it, else made from the request."""
    typed = request.get("argv")
    if isinstance(typed, list) and typed:
        return shlex.join(str(part) for part in typed)
    command = str(request.get("command") or kind)
    settings = declared_by_field(*_REQUESTS)
    defaults = _defaults()
    parts = ["brim", command]
    for field, value in request.items():
        if field in _NOT_FLAGS or value is None or value in ("", [], (), {}) or value == defaults.get(field):
            continue
        known = settings.get(field)
        if field == "model" and command == "find":
            parts.append(str(value))
        elif known is None or known.setting.only != "python":
            parts += flag_parts(field, value, known)
    return shlex.join(parts)


def declared_by_field(*requests: type[Any]) -> dict[str, Declared]:
    """What each field of these requests is declared as."""
    found: dict[str, Declared] = {}
    for request in requests:
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


def flag_parts(field: str, value: Any, known: Declared | None) -> list[str]:
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
