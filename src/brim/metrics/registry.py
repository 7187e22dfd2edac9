"""Metrics by name: the built-in ones, their other names, and those that a Python file adds."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from brim.errors import BrimError, RequestError, nearest_names
from brim.metrics.anls import Anls
from brim.metrics.base import Metric
from brim.metrics.bleu import Bleu
from brim.metrics.choice import ChoiceAccuracy, ChoiceAccuracyNormalised
from brim.metrics.cider import Cider
from brim.metrics.contains import Contains
from brim.metrics.exact_match import ExactMatch
from brim.metrics.normalised_match import NormalisedMatch
from brim.metrics.rouge import RougeL
from brim.metrics.token_f1 import TokenF1
from brim.metrics.topk import TopK
from brim.metrics.vqa import VqaAccuracy, VqaAccuracySimple
from brim.settings.caller import given

__all__ = [
    "ALIASES", "add_metrics", "get_metric", "import_file", "load_metric_file", "metric_names", "parse_metrics",
]  # fmt: skip

_BUILT_IN: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        VqaAccuracy(),
        VqaAccuracySimple(),
        ExactMatch(),
        NormalisedMatch(),
        Contains(),
        TokenF1(),
        Bleu(),
        RougeL(),
        Anls(),
        Cider(),
        TopK(1),
        TopK(5),
        ChoiceAccuracy(),
        ChoiceAccuracyNormalised(),
    )
}

ALIASES = {
    "acc": "exact_match",
    "accuracy": "exact_match",
    "choice": "choice_accuracy",
    "choice_accuracy_normalized": "choice_accuracy_normalised",
    "choice_normalised": "choice_accuracy_normalised",
    "choice_normalized": "choice_accuracy_normalised",
    "cider_d": "cider",
    "em": "exact_match",
    "f1": "token_f1",
    "normalized_match": "normalised_match",
    "rouge": "rouge_l",
    "rougel": "rouge_l",
    "sacrebleu": "bleu",
    "top_1": "top1",
    "top_5": "top5",
    "vqa": "vqa_accuracy",
    "vqa_score": "vqa_accuracy",
    "vqa_simple": "vqa_accuracy_simple",
}

_added: dict[str, tuple[Path, Metric]] = {}  # name: the file that added it, and the metric


def metric_names() -> list[str]:
    """Every metric that can be asked for, the added ones last; aliases are not listed."""
    return [*_BUILT_IN, *_added]


def get_metric(name: str) -> Metric:
    """The metric of that name or alias, ready to use: a library that it lacks is told now."""
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
    """Import a Python file and add the metrics it defines: instances, and classes that need no argument.

    Gives the names. Loading a file again replaces what it added before; a name that is taken is a `RequestError`,
    and then nothing of the file is added.
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
    return _import_file(file.resolve())


def add_metrics(module: ModuleType) -> list[str]:
    """Add the metrics that a module defines, if any; gives their names."""
    file = Path(str(module.__file__))
    found: dict[str, Metric] = {}
    for metric in _defined_in(module, file):
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


def _defined_in(module: ModuleType, file: Path) -> Iterator[Metric]:
    """The module's metrics in their order: instances, and the concrete classes it defines but does not call itself."""
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
            raise RequestError(f"metric file {file}: {value.__name__}() raised {_described(error)}") from error


def _import_file(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:12]
    module_name = f"brim_metrics_{file.stem}_{digest}"  # the same text is imported once, an edited file anew
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RequestError(f"metric file {file}: it is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise RequestError(f"metric file {file}: importing it raised {_described(error)}") from error
    return module


def _described(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    return f"{type(error).__name__}: {error}"


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
