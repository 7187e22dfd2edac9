"""Python files as modules: of the user (factories, metrics, tasks), and of brim where a folder is read for them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["describe_error", "import_file", "importable", "submodules"]


def import_file(file: Path, *, prefix: str) -> ModuleType:
    """The file as a module, run once for each content: an edited file is a new module.

    Whatever the file raises is raised; a name that does not end in .py is an `ImportError`.
    """
    file = file.resolve()
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:12]
    module_name = f"{prefix}_{file.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickle look there
    try:
        with importable(file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextlib.contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Let the user's code import the files beside it, as it could when run as a script."""
    if folder is None or str(folder) in sys.path:
        yield
        return
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def describe_error(error: Exception) -> str:
    """`ValueError: text (file:line)`, with the line that raised."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def submodules(package: str, *, without: Sequence[str] = ()) -> list[ModuleType]:
    """The files of a package's folder as modules, by name: what they declare needs no list of them elsewhere."""
    names = [found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return [importlib.import_module(f"{package}.{name}") for name in names if name not in without]
