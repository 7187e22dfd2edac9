"""`--settings FILE`: the settings of a command in YAML, by the names of its flags, with the line of each.

    model: ./my-model
    batch-size: 8           # or batch_size
    metrics: [bleu, rouge]
    knob: {max_crops: 4}

Flags on the command line come before the file. Does not know how a command line is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import nearest_names
from brim.settings.declare import Declared
from brim.settings.problems import Problem, raise_errors
from brim.settings.yaml_file import read_yaml

__all__ = ["FromFile", "read_settings_file"]

FromFile = tuple[dict[str, Any], dict[str, str]]  # values by name, as flags would give them; and where each stands


def read_settings_file(file: str, known: Sequence[Declared]) -> FromFile:
    """The file's settings by name; a `RequestError` names every key that the command lacks, with its line."""
    document = read_yaml(file)
    settings = {one.name: one for one in known}
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    problems: list[Problem] = []
    for key, value in document.data.items():
        name, on = _name(key, settings)
        line = document.line(key)
        message = ""
        if name not in settings:
            message = f"there is no such setting{nearest_names(name, settings)}"
        elif name in values:
            message = f"{name} is given twice; keep one"
        elif value is not None:
            try:
                values[name] = _as_flag(settings[name], value, on=on)
            except ValueError as error:
                message = f"{value!r}: {error}"
            lines[name] = f"{Path(file).name}: {key} (line {line})"
        if message:
            problems.append(Problem(severity="error", file=file, line=line, key=key, message=message))
    raise_errors(problems)
    return values, lines


def _name(key: str, settings: Mapping[str, Declared]) -> tuple[str, bool]:
    """The setting that a key names; `no_chat` is `chat` turned off."""
    name = key.replace("-", "_")
    positive = name.removeprefix("no_")
    if name not in settings and positive in settings and settings[positive].switch:
        return positive, False
    return name, True


def _as_flag(one: Declared, value: Any, *, on: bool = True) -> Any:
    """A value of YAML as the flag would give it: text, a list of texts, or true and false."""
    if one.switch:
        if not isinstance(value, bool):
            raise ValueError("it must be true or false")
        return value is on
    if isinstance(value, Mapping):
        entries = [name if item is None else f"{name}={_text(item)}" for name, item in value.items()]
        if not one.setting.many:
            raise ValueError("it is one value, not a mapping")
        return entries
    if isinstance(value, list):
        return [_text(item) for item in value] if one.setting.many else _text(value)
    return [_text(value)] if one.setting.many else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError("it must be a text, a number or a list of them")
