"""The functions of `brim.api`, written from the declarations: explicit parameters, types, defaults and docstrings.

`generated.py` writes the file and a test keeps it current, so that editors and type checkers see what the command line
takes.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from brim.settings.commands import COMMANDS, Command, PythonCall
from brim.settings.declare import AS_FIELD, Declared, declared

__all__ = ["python_module"]

WIDTH = 116
_HEAD = '''"""The commands as Python functions: the same settings, by the same names.

Written by `python -m brim.settings.generated` from the declarations in `brim.settings`; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from brim.calls import call, command_of

if TYPE_CHECKING:
    import torch
    from torch import nn

'''


def python_module() -> str:
    """The text of `brim.api`."""
    calls = [(command, command.python) for command in COMMANDS.values() if command.python is not None]
    calls.sort(key=lambda one: one[1].name)
    homes = sorted(call.returns.split(":") for _, call in calls)
    imports = "".join(f"    from {module} import {name}\n" for module, name in homes)
    names = ", ".join(f'"{call.name}"' for _, call in calls)
    functions = "\n\n".join(_function(command, call) for command, call in calls)
    return f"{_HEAD}{imports}\n__all__ = [{names}]\n\n\n{functions}"


def _function(command: Command, call: PythonCall) -> str:
    settings = [
        one for one in declared(command.declaration()) if one.setting.only != "flags" and not one.setting.hidden
    ]
    placed = [one for one in settings if one.setting.argument or one.setting.positional]
    placed.sort(key=lambda one: _parameter_default(one) is not dataclasses.MISSING)
    named = [one for one in settings if one not in placed]
    lines = [*(f"    {_parameter(one)}," for one in placed), "    *,", *(f"    {_parameter(one)}," for one in named)]
    result = call.returns.partition(":")[2]
    return "\n".join(
        [
            f'@command_of("{command.name}")',
            f"def {call.name}(",
            *lines,
            f") -> {result}:",
            textwrap.indent(_docstring(command, call, [*placed, *named]), "    "),
            f'    result: {result} = call("{command.name}", locals())',
            "    return result",
            "",
        ]
    )


def _parameter(one: Declared) -> str:
    default = _parameter_default(one)
    return f"{one.name}: {_annotation(one)}" + ("" if default is dataclasses.MISSING else f" = {_literal(default)}")


def _parameter_default(one: Declared) -> Any:
    return one.default if one.setting.python_default is AS_FIELD else one.setting.python_default


def _annotation(one: Declared) -> str:
    return one.setting.python or (one.type.__name__ if isinstance(one.type, type) else str(one.type))


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _docstring(command: Command, call: PythonCall, settings: list[Declared]) -> str:
    lines = [f'"""{command.summary}', ""]
    lines += textwrap.wrap(f"As `brim {command.name}` on the command line.", WIDTH - 4)
    lines += ["", "Args:"]
    for one in settings:
        text = f"{one.name}: {one.setting.python_help or one.setting.help}"
        lines += textwrap.wrap(text, WIDTH - 8, initial_indent="    ", subsequent_indent="        ")
    lines += ["", "Returns:", *textwrap.wrap(call.told, WIDTH - 8, initial_indent="    ", subsequent_indent="    ")]
    lines += ["", "Example:", "", *(f"    {line}" for line in call.example.splitlines()), '"""']
    return "\n".join(lines)
