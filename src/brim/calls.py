"""From a Python call to the library: its values read as a command's settings, and the same function run.

`brim.api` has the signatures; which parameters there were before, and what they are called now, is in the commands.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from brim.errors import RequestError, nearest_names
from brim.settings.commands import COMMANDS
from brim.settings.declare import declared, read_settings

__all__ = ["call", "command_of"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_RUNNERS = {  # the function that the command line calls as well
    "find": "brim.planning.find:find_recorded",
    "forecast": "brim.planning.forecast:forecast",
    "eval": "brim.evaluation.run:evaluate_as",
    "lm-eval": "brim.integrations.lm_eval_run:run_lm_eval",
    "profile": "brim.profiling.run:profile_as",
    "train": "brim.training.seeds.run:train_as",
    "sweep": "brim.sweeps.prepare:sweep",
    "ood": "brim.molecules.run:ood",
    "encode": "brim.molecules.encoding:encode",
    "advise": "brim.advice.advise:advise",
    "check": "brim.advice.checks:check_as",
    "report": "brim.reporting.write:report_as",
    "watch": "brim.monitor.snapshot:take_snapshot",
    "doctor": "brim.diagnosis.examine:examine_as",
}


def call(command: str, values: Mapping[str, Any]) -> Any:
    """Run a command's function; a value that is the parameter's default counts as not given."""
    kind = COMMANDS[command].declaration()
    defaults = {one.name: one.default for one in declared(kind)}
    given = {
        name: value
        for name, value in values.items()
        if value is not None and not (type(value) is type(defaults.get(name)) and value == defaults[name])
    }
    module, _, function = _RUNNERS[command].partition(":")
    return getattr(importlib.import_module(module), function)(read_settings(kind, given))


def command_of(command: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Let a function understand the parameters of before, and refuse unknown ones with the nearest names."""

    def decorated(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)
        python = COMMANDS[command].python
        old = {} if python is None else python.old_names

        @functools.wraps(function)
        def called(*arguments: _Parameters.args, **settings: _Parameters.kwargs) -> _Result:
            if all(name in signature.parameters for name in settings):
                return function(*arguments, **settings)
            for name in settings:
                if name not in signature.parameters and name not in old:
                    near = nearest_names(name, signature.parameters)
                    raise RequestError(f"{function.__name__}() has no setting {name!r}{near}")
            renamed = {name: value for name, value in settings.items() if name in signature.parameters}
            renamed |= {
                old[name].removeprefix("!"): not value if old[name].startswith("!") else value
                for name, value in settings.items()
                if name not in signature.parameters
            }
            result: _Result = call(command, {**signature.bind_partial(*arguments).arguments, **renamed})
            return result

        return called

    return decorated
