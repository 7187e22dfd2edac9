"""Metrics by name: the built-in ones, their other names, and those that a Python file adds.

A built-in metric is a class in a file of this folder, with its `name` and `aliases`; no code lists it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from brim.errors import BrimError, RequestError, nearest_names
from brim.metrics.base import Metric
from brim.settings.caller import given
from brim.storage.python_files import describe_error, submodules
from brim.storage.python_files import import_file as import_python_file

__all__ = [
    "ALIASES", "add_metrics", "get_metric", "import_file", "load_metric_file", "metric_names", "parse_metrics",
]  # fmt: skip

_added: dict[str, tuple[Path, Metric]] = {}  # name: the file that added it, and the metric


def metric_names() -> list[str]:
    """Every metric's name, the added ones last; aliases are not listed."""
    return [*_BUILT_IN, *_added]


def get_metric(name: str) -> Metric:
    """The metric of that name or alias; a `RequestError` where a library that it needs is not installed."""
    plain = _plain(name)
    plain = ALIASES.get(plain, plain)
    metric = _BUILT_IN.get(plain) or (_added[plain][1] if plain in _added else None)
    if metric is None:
        near = nearest_names(plain, [*metric_names(), *ALIASES])
        raise RequestError(f"metric {name!r} does not exist{near or '; there are ' + ', '.join(metric_names())}")
    metric.prepare()
    return metric


def parse_metrics(text: str | Iterable[str]) -> list[Metric]:
    """The metrics of a list such as `bleu,rouge,exact_match`: in its order, each once."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise RequestError(f"{given('metrics', text)} names no metric; there are {', '.join(metric_names())}")
    return list({metric.name: metric for metric in map(get_metric, names)}.values())


def load_metric_file(path: str | Path) -> list[str]:
    """Import a Python file, add the metrics that it defines (instances, and classes without arguments), return names.

    Loading a file again replaces what it added before; a name that is taken is a `RequestError`, and then nothing of
    the file is added.
    """
    module = import_file(path)
    names = add_metrics(module)
    if not names:
        raise RequestError(
            f"metric file {module.__file__}: it defines no metric; derive a class from brim.metrics.base.Metric"
        )
    return names


def import_file(path: str | Path) -> ModuleType:
    """A Python file as a module; what is wrong with it is a `RequestError`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise RequestError(f"metric file {file}: there is no such file")
    try:
        return import_python_file(file, prefix="brim_metrics")
    except Exception as error:
        raise RequestError(f"metric file {file}: importing it raised {describe_error(error)}") from error


def add_metrics(module: ModuleType) -> list[str]:
    """Add the metrics that a module defines, if any, and return their names."""
    file = Path(str(module.__file__))
    found: dict[str, Metric] = {}
    for metric in _defined_in(module):
        _check_name(metric, file, found)
        found[metric.name] = metric
    for name in [name for name, (origin, _) in _added.items() if origin == file]:
        del _added[name]
    _added.update({name: (file, metric) for name, metric in found.items()})
    return list(found)


def _check_name(metric: Metric, file: Path, found: dict[str, Metric]) -> None:
    name = getattr(metric, "name", None)
    kind = type(metric).__name__
    if not isinstance(name, str) or not name or name != _plain(name) or "," in name:
        raise RequestError(
            f"metric file {file}: {kind} has the name {name!r}; it must be lower-case words joined by underscores"
        )
    if name in _BUILT_IN or name in ALIASES:
        raise RequestError(f"metric file {file}: {kind} is called {name}, which is one of brim's own; rename it")
    if name in found:
        raise RequestError(f"metric file {file}: two metrics are called {name}; rename one")
    if name in _added and _added[name][0] != file:
        raise RequestError(f"metric file {file}: {kind} is called {name}, as one in {_added[name][0]}; rename it")


def _defined_in(module: ModuleType) -> Iterator[Metric]:
    """A module's metrics: its instances, then one of each concrete class that it defines and has no instance of."""
    values = [value for key, value in vars(module).items() if not key.startswith("_")]
    instances = list({id(value): value for value in values if isinstance(value, Metric)}.values())
    yield from instances
    for value in dict.fromkeys(value for value in values if inspect.isclass(value) and issubclass(value, Metric)):
        own = value.__module__ == module.__name__ and not inspect.isabstract(value)
        if not own or any(type(instance) is value for instance in instances):
            continue
        try:
            yield value()
        except BrimError:
            raise
        except Exception as error:
            raise RequestError(
                f"metric file {module.__file__}: {value.__name__}() raised {describe_error(error)}"
            ) from error


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


_found = [metric for file in submodules("brim.metrics", without=("registry",)) for metric in _defined_in(file)]
_BUILT_IN = {metric.name: metric for metric in sorted(_found, key=lambda metric: metric.name)}
ALIASES = {alias: metric.name for metric in _BUILT_IN.values() for alias in metric.aliases}
