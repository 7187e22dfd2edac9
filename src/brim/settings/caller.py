"""How a message names a setting: as its caller wrote it.

    command line    --batch-size 0: it must be auto or a whole number from 1
    Python          batch_size=0: it must be auto or a whole number from 1
    a file          settings.yaml: batch_size (line 7): 0: it must be auto or a whole number from 1

Code that refuses a setting names it with `named`, `given`, `written` or `pair`. The command line declares once, around
all that it runs, that it is the caller; outside of it the caller is Python. Does not know which settings there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["called_by_flags", "flag_of", "given", "named", "named_as", "pair", "resume_with", "switched_off", "written"]


@dataclasses.dataclass(frozen=True)
class _Caller:
    """Where settings were written: a line of a file, or else a flag or a parameter."""

    flags: bool = False
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict)  # `settings.yaml: batch_size (line 7)`


_OF_A_COMMAND = "BRIM_CALLED_BY_FLAGS"  # in the environment of processes that a command starts: they say it as it does
_callers: list[_Caller] = [_Caller(flags=_OF_A_COMMAND in os.environ)]  # the innermost last; the first is Python


@contextlib.contextmanager
def _called_by(caller: _Caller) -> Iterator[None]:
    _callers.append(caller)
    try:
        yield
    finally:
        _callers.pop()


@contextlib.contextmanager
def called_by_flags(lines: Mapping[str, str] | None = None) -> Iterator[None]:
    """While inside, settings are named as flags, in child processes too; those of `lines` by their line of a file."""
    before = os.environ.get(_OF_A_COMMAND)
    os.environ[_OF_A_COMMAND] = "1"
    try:
        with _called_by(_Caller(flags=True, lines=dict(lines or {}))):
            yield
    finally:
        if before is None:
            os.environ.pop(_OF_A_COMMAND, None)


def named_as(**names: str) -> contextlib.AbstractContextManager[None]:
    """While inside, these settings are named otherwise: `optimizer="optimizer.name"`, as a training file has it."""
    outer = _callers[-1]
    return _called_by(dataclasses.replace(outer, lines={**outer.lines, **names}))


def flag_of(name: str) -> str:
    """`--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")


def named(name: str) -> str:
    """A setting without its value: `--batch-size`, `batch_size=`."""
    caller = _callers[-1]
    return caller.lines.get(name) or (flag_of(name) if caller.flags else f"{name}=")


def switched_off(name: str) -> str:
    """A switch that is off: `--no-chat`, `chat=False`."""
    return f"--no-{name.replace('_', '-')}" if _callers[-1].flags else f"{name}=False"


def written(name: str, text: object) -> str:
    """A setting with a value as people would type it: `--batch-size N`, `batch_size=N`."""
    caller = _callers[-1]
    if name in caller.lines:
        return f"{caller.lines[name]}: {text}"
    return f"{flag_of(name)} {text}" if caller.flags else f"{name}={text}"


def given(name: str, value: Any) -> str:
    """A setting with the value it was given: `--device gpu`, `device='gpu'`; a switch that is on, without."""
    caller = _callers[-1]
    if not caller.flags and name not in caller.lines:
        return f"{name}={str(value) if isinstance(value, os.PathLike) else value!r}"
    if value is True:
        return named(name)
    if isinstance(value, (list, tuple)):
        return written(name, " ".join(map(str, value)))
    return written(name, f"{value:g}" if isinstance(value, float) else str(value))


def pair(name: str, key: str, value: Any) -> str:
    """One entry of a setting that has several: `--knob size=224`, `knob={'size': 224}`."""
    if _callers[-1].flags or name in _callers[-1].lines:
        return written(name, f"{key}={value}")
    return f"{name}={{{key!r}: {value!r}}}"


def resume_with(folder: object) -> str:
    """What to give to continue the run in a folder."""
    return f"--resume -o {folder}" if _callers[-1].flags else f"resume=True, output={str(folder)!r}"
