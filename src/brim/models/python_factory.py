"""Models by a factory in the user's own Python: `py:FILE_OR_MODULE:FACTORY`.

    def net(size=64, *, device):  # one knob: size
        model = Net().to(device)
        return {"model": model, "step": torch.no_grad()(model),
                "make_batch": lambda n: torch.randn(n, 3, size, size, device=device)}

The factory's parameters with defaults are its knobs. Parameters called device, dtype, mode, optimizer and
gradient_checkpointing get the values of the request (dtype as a `torch.dtype`, or None for auto) and are not knobs.
It returns a `Workload`, a pair (step, make_batch), or a dictionary of `CallableWorkload`'s arguments. A workload
without an identity of its own is cached under a digest of the factory's file.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from brim.errors import BrimError, RequestError, nearest_names
from brim.memory.weights import load_failure
from brim.storage.python_files import describe_error, import_file, importable
from brim.workloads.base import Workload
from brim.workloads.callables import CallableWorkload
from brim.workloads.knobs import Knob

__all__ = [
    "FACTORY_ARGUMENTS",
    "call_factory",
    "factory_knobs",
    "factory_source_digest",
    "lacks_default",
    "load_function",
    "takes_argument",
]

FACTORY_ARGUMENTS = ("device", "dtype", "mode", "optimizer", "gradient_checkpointing")


def factory_knobs(name: str) -> tuple[Knob, ...]:
    """The factory's parameters that have a default, apart from those that brim sets."""
    return tuple(
        Knob(name=parameter.name, default=parameter.default)
        for parameter in _parameters(name).values()
        if parameter.name not in FACTORY_ARGUMENTS and parameter.default is not inspect.Parameter.empty
    )


def call_factory(
    name: str, *, knobs: Mapping[str, Any], arguments: Mapping[str, Any], device: torch.device | None = None
) -> Workload:
    """Call the factory with its knobs and those of `arguments` that it names, and make a workload of the result.

    `device` is used if the result has neither a model nor a device.
    """
    result = _call(name, knobs, arguments)
    given = arguments.get("device") if takes_argument(name, "device") else None
    return _as_workload(name, result, given, device)


def load_function(
    name: str, *, knobs: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None
) -> Callable[[list[Any]], Any]:
    """The function that a factory makes for an evaluation: a list of samples in, one answer for each out."""
    result = _call(name, knobs, {"device": device, "dtype": dtype})
    if not callable(result):
        raise RequestError(
            f"py:{name}: the factory returned {type(result).__name__}; for an evaluation it must return a function "
            "that takes a list of samples and gives an answer for each"
        )
    function: Callable[[list[Any]], Any] = result
    return function


def _call(name: str, knobs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    module, factory = _load(name)
    parameters = _parameters(name)
    taken = {key: value for key, value in arguments.items() if key in parameters}
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.name not in taken
    ]
    if missing:
        raise RequestError(
            f"py:{name}: the factory wants {', '.join(missing)}; give them defaults to make them knobs. A factory "
            "makes the model: where this function is the model itself, return it from another one and name that"
        )
    try:
        with importable(_folder_of(module)):
            return factory(**knobs, **taken)
    except BrimError:
        raise
    except Exception as error:
        full = load_failure(error, taken.get("device"), what=f"py:{name}: the factory raised")
        if full is not None:
            raise full from error
        raise RequestError(f"py:{name}: factory raised {describe_error(error)}") from error


def takes_argument(name: str, argument: str) -> bool:
    """Whether the factory has a parameter of that name."""
    return argument in _parameters(name)


def lacks_default(name: str, argument: str) -> bool:
    """Whether the factory has a parameter of that name and cannot be called without it."""
    parameter = _parameters(name).get(argument)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def factory_source_digest(name: str) -> str | None:
    """A digest of the source that defines the factory; None where there is no file."""
    module, _ = _load(name)
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def _as_workload(name: str, result: Any, given: torch.device | None, otherwise: torch.device | None) -> Workload:
    if isinstance(result, Workload):
        return result
    if isinstance(result, tuple) and len(result) == 2 and all(callable(member) for member in result):
        result = {"step": result[0], "make_batch": result[1]}
    if not isinstance(result, dict):
        raise RequestError(
            f"py:{name}: the factory returned {type(result).__name__}; it must return a brim Workload, a pair "
            "(step, make_batch), or a dictionary of CallableWorkload's arguments"
        )
    known = inspect.signature(CallableWorkload).parameters
    unknown = [key for key in result if key not in known]
    absent = [key for key in ("step", "make_batch") if key not in result]
    if unknown or absent:
        wrong = f"unknown {', '.join(map(str, unknown))}" if unknown else f"no {', '.join(absent)}"
        raise RequestError(f"py:{name}: the factory returned a dictionary with {wrong}; it takes {', '.join(known)}")
    device = given or (otherwise if result.get("model") is None else None)
    return CallableWorkload(**{"device": device, **result})


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    _, factory = _load(name)
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"py:{name}: its parameters cannot be read ({error}); wrap it in a plain function"
        ) from error
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: parameter for key, parameter in parameters.items() if parameter.kind in by_keyword}


def _load(name: str) -> tuple[ModuleType, Callable[..., Any]]:
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise RequestError(f"MODEL py:{name}: write it as py:FILE_OR_MODULE:FACTORY, for example py:nets.py:small_net")
    module = _import_file(name, Path(where).expanduser()) if where.endswith(".py") else _import_module(name, where)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        what = "is not callable" if hasattr(module, attribute) else "does not exist"
        has = f"; {where} has {', '.join(there)}" if there else ""
        raise RequestError(f"MODEL py:{name}: {attribute} {what}{has}{nearest_names(attribute, there)}")
    return module, factory


def _import_file(name: str, file: Path) -> ModuleType:
    if not file.is_file():
        folder = file.parent
        there = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
        raise RequestError(f"MODEL py:{name}: there is no file {file}{nearest_names(file.name, there)}")
    try:
        return import_file(file, prefix="brim_factory")
    except Exception as error:
        raise RequestError(f"MODEL py:{name}: importing {file} raised {describe_error(error)}") from error


def _import_module(name: str, where: str) -> ModuleType:
    try:
        with importable(Path.cwd()):
            return importlib.import_module(where)
    except ModuleNotFoundError as error:
        hint = f"; for a file write py:{where}.py:…" if error.name == where and "." not in where else ""
        raise RequestError(f"MODEL py:{name}: {error}{hint}") from error
    except Exception as error:
        raise RequestError(f"MODEL py:{name}: importing {where} raised {describe_error(error)}") from error


def _folder_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None
