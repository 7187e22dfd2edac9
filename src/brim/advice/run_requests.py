"""A run's request: as the command line that asks the same, with settings changed as a request that runs, as a file.

Which flag a field of a request is comes from the declarations of the settings. An evaluation's settings have the names
of its flags, those of a training run are dotted keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.advice.base import Advice
from brim.advice.run_reader import Run, mapping
from brim.errors import BrimError, RequestError
from brim.settings.caller import flag_of
from brim.settings.config_files import read_training_file
from brim.settings.declare import Declared, declared, flag_names, read_settings
from brim.settings.eval_settings import EvalRequest
from brim.settings.find_settings import SearchSettings, WorkloadRequest
from brim.settings.nested_keys import flatten, nest
from brim.settings.profile_settings import SEED_SCALE, ProfileRequest
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import train_settings

__all__ = [
    "asked_settings", "changed_settings", "command_of", "command_with", "eval_request", "settings_text",
    "train_request",
]  # fmt: skip

_NOT_FLAGS = ("command", "argv", "resume")
_REQUESTS = (SearchSettings, WorkloadRequest, EvalRequest, ProfileRequest)
_OF_A_SIZE = ("batch_size", "no_auto_batch_size", "fail_on_oom", "cost_cap")


def asked_settings(run: Run) -> dict[str, Any]:
    """What a run was asked for, by the names that callers write, without defaults."""
    if run.kind == "eval":
        return _eval_settings(run.request)
    if run.kind == "train" and mapping(run.request.get("settings")):
        default = flatten(train_settings({"model": {"type": "any"}}).to_json())
        asked = flatten(mapping(run.request["settings"]))
        return {key: value for key, value in asked.items() if value != default.get(key) and value not in ({}, None)}
    raise RequestError(
        f"{run.folder}: it is a run of {run.request.get('command') or run.kind}; advice is for runs of brim eval and "
        "brim train (also for one inside a profile or a sweep: name its folder)"
    )


def _eval_settings(request: Mapping[str, Any]) -> dict[str, Any]:
    names = flag_names(EvalRequest)
    switched = {one.name for one in declared(EvalRequest) if one.setting.inverted}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(EvalRequest):
        value = request.get(field.name)
        plain = tuple(value) if isinstance(value, list) else value
        if field.name in ("resume", "retry_failed") or plain in (None, {}, ()) or plain == field.default:
            continue
        found[names[field.name]] = not value if names[field.name] in switched else value
    return found


def changed_settings(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same with some changed; a setting that says the same as a changed one, or contradicts it, is left out."""
    asked = asked_settings(run)
    if run.kind == "eval":
        if {"batch_size", "cost_cap"} & settings.keys():
            asked = {name: value for name, value in asked.items() if name not in _OF_A_SIZE}
        if "max_tokens" in settings and "knob" in asked:
            asked["knob"] = {name: value for name, value in asked["knob"].items() if name != "max_new_tokens"}
        if "dtype" in settings and "knob" in asked:
            asked["knob"] = {name: value for name, value in asked["knob"].items() if name != "dtype"}
    merged = {**asked, **settings}
    return {name: value for name, value in merged.items() if value is not None and value != {}}


def eval_request(run: Run, settings: Mapping[str, Any], **changes: Any) -> EvalRequest:
    """The request of an evaluation with these settings; `changes` are fields."""
    return dataclasses.replace(read_settings(EvalRequest, changed_settings(run, settings)), **changes)


def train_request(run: Run, settings: Mapping[str, Any], **more: Any) -> TrainRequest:
    """The request of a training run with these settings; `more` has further keys."""
    nested = nest({**changed_settings(run, settings), **{name: value for name, value in more.items() if value}})
    return TrainRequest(settings=train_settings(nested), **_train_options(run, settings))


def _train_options(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a training request beside its settings."""
    request = run.request
    options = {
        name: request.get(name, default)
        for name, default in (("fixed", False), ("fail_on_oom", False), ("per_rank", False), ("use_cache", True))
    }
    if "hp.batch_size" in settings:
        options["fixed"] = options["fail_on_oom"] = False
    return options


def command_with(run: Run, advice: Advice) -> str:
    """The exact command line of a run with a piece of advice."""
    words = _eval_words(run, advice.settings) if run.kind == "eval" else _train_words(run, advice.settings)
    if words is None:
        written = shlex.join(["brim", "advise", str(run.folder), "--take", advice.name, "--apply", "advised.yaml"])
        return f"{written} && brim train advised.yaml"
    processes = advice.processes or int(run.summary.get("ranks") or 1)
    if processes > 1:
        words = ["torchrun", f"--nproc-per-node={processes}", "-m", *words]
    variables = [f"{name}={value}" for name, value in advice.environment.items()]
    return " ".join([*variables, shlex.join(words)])


def _eval_words(run: Run, settings: Mapping[str, Any]) -> list[str]:
    return shlex.split(command_of({**eval_request(run, settings).to_json(), "command": "eval"}, kind="eval"))


def _train_words(run: Run, settings: Mapping[str, Any]) -> list[str] | None:
    """The file with overrides; None for a run that was not made from a file, or from one that has gone."""
    file, options = run.request.get("file"), _train_options(run, settings)
    try:
        before = flatten(train_settings(read_training_file(str(file))[0]).to_json()) if file else None
    except (BrimError, OSError):
        before = None
    if before is None:
        return None
    after = flatten(train_settings(nest(changed_settings(run, settings))).to_json())
    overrides = [f"{key}={json.dumps(value)}" for key, value in after.items() if value != before.get(key)]
    plain = [one.replace('"', "") if one.count('"') == 2 else one for one in overrides]
    known = _declared_by_field(TrainRequest)
    asked = {**options, "seeds": run.request.get("seeds"), "fast_path": run.request.get("fast_path")}
    usual = {field.name: field.default for field in dataclasses.fields(TrainRequest)}
    flags = [
        part
        for name, value in asked.items()
        if value not in (None, [], ()) and value != usual[name]
        for part in _flag_parts(name, value, known[name])
    ]
    return ["brim", "train", str(file), *plain, *flags]


def settings_text(run: Run, settings: Mapping[str, Any], *, title: str) -> str:
    """A YAML file: for `brim eval --settings FILE`, or for `brim train FILE`."""
    changed = changed_settings(run, settings)
    if run.kind == "train":
        lines = [f"# {title}", "# brim train THIS_FILE", *_yaml_lines(nest(changed))]
    else:
        hidden = {one.name for one in declared(EvalRequest) if one.setting.only == "python"}
        kept = {name: value for name, value in changed.items() if name not in hidden}
        lines = [f"# {title}", "# brim eval --settings THIS_FILE", *_yaml_lines(_absolute(kept), deep=False)]
    return "\n".join(lines) + "\n"


def _absolute(settings: dict[str, Any]) -> dict[str, Any]:
    """The data by its whole path, where it is a file here: the settings may be used from another folder."""
    data = settings.get("data")
    there = isinstance(data, str) and Path(data).exists()
    return {**settings, "data": str(Path(str(data)).resolve())} if there else settings


def _yaml_lines(nested: Mapping[str, Any], indent: str = "", *, deep: bool = True) -> Iterator[str]:
    for name, value in nested.items():
        if deep and isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"  # JSON is YAML


def command_of(request: Mapping[str, Any], *, kind: str) -> str:
    """The command line that asks the same: as it was typed where the run kept it, else made from the request."""
    typed = request.get("argv")
    if isinstance(typed, list) and typed:
        return shlex.join(str(part) for part in typed)
    command = str(request.get("command") or kind)
    settings = _declared_by_field(*_REQUESTS)
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


def _declared_by_field(*requests: type[Any]) -> dict[str, Declared]:
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
