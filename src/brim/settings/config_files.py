"""The YAML files of `brim train` and `brim sweep`, checked: every problem of a file at once, each with its line.

A training file has the keys of `train_settings.py`. A sweep's file has them too, shared by all experiments, and:

    models_to_train       only these models; pairs are dropped whole
    max_experiments       the first so many
    gpu.device_ids        0, "0,1" or [0, 1]
    grid_search
      grid                dotted key → list of values; or, instead,
      groups              name → such a mapping, each combined for itself
      fixed               settings of every experiment, over those of the sections
      pairing             auto (the rule of grid_pairing.py), zip or product
      zip                 groups of keys whose lists go together: [[model.type, hp.batch_size, hp.frames]]
      exclude, include    lists of mappings: combinations to drop, experiments to add
      repeat, seeds       every experiment so many times, or with each of these seeds

A function that the caller passes checks whether a model exists. Does not run anything, nor know what fits a device.

    sweep = read_sweep("config/ucf101_video_grid.yaml", overrides=["hp.learning_rate=0.01"])
    sweep.expand(max_experiments=3).experiments
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import given
from brim.settings.grid import MOST_EXPERIMENTS, Expansion, Experiment, GridSpec, try_expand
from brim.settings.nested_keys import nest, plain_value
from brim.settings.problems import Problem, Severity, has_errors, in_order, raise_errors, strictly
from brim.settings.setting_reader import CheckModel, Origins
from brim.settings.sweep_reader import SweepReader
from brim.settings.train_settings import IGNORED_KEYS, setting_problems
from brim.settings.yaml_file import Document, inspect_yaml, parse_overrides

__all__ = [
    "Source", "SweepFile", "expand_grid", "inspect_sweep", "inspect_training_file", "read_sweep",
    "read_training_file", "validate_grid",
]  # fmt: skip

Source = str | os.PathLike[str] | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A checked file: its grid, what it asks of the sweep itself, and where everything stands."""

    document: Document
    spec: GridSpec
    origins: Origins
    max_experiments: int | None = None
    device_ids: tuple[int, ...] | None = None  # of gpu.device_ids
    results_file: str | None = None
    problems: tuple[Problem, ...] = ()  # none is an error

    def expand(
        self, *, max_experiments: int | None = None, most: int = MOST_EXPERIMENTS, strict: bool = False
    ) -> Expansion:
        """The experiments; `max_experiments` comes before the number that the file has."""
        expansion, problems = self.try_expand(max_experiments=max_experiments, most=most)
        raise_errors(strictly(problems) if strict else problems)
        assert expansion is not None  # without an error there is one
        return expansion

    def try_expand(
        self, *, max_experiments: int | None = None, most: int = MOST_EXPERIMENTS
    ) -> tuple[Expansion | None, tuple[Problem, ...]]:
        """As `expand`, with the problems as records, those of the file among them."""
        limit = self.max_experiments if max_experiments is None else max_experiments
        expansion, found = try_expand(self.spec, max_experiments=limit, most=most)
        problems = [*self.problems, *found]
        if expansion is not None:
            problems += self._settings_at_odds(expansion.experiments)
            problems += self._cut(expansion, asked=max_experiments)
        if expansion is None or has_errors(problems):
            return None, tuple(problems)
        return dataclasses.replace(expansion, problems=tuple(problems)), tuple(problems)

    def problem(
        self, experiment: Experiment, key: str, message: str, *, fix: str = "", severity: Severity = "error"
    ) -> Problem:
        """Something that turned out about a setting of an experiment, with the line where the file has it."""
        file, line = self.origins.find(key, experiment.group, experiment.positions.get(key))
        if experiment.line is not None and key in experiment.varied and file == self.document.file:
            line = experiment.line
        return Problem(severity=severity, message=message, fix=fix, file=file, line=line, key=key)

    def _settings_at_odds(self, experiments: Sequence[Experiment]) -> list[Problem]:
        """What is wrong with settings together: one experiment of each set of keys and each model is checked."""
        kinds: dict[frozenset[str], Experiment] = {}
        for experiment in experiments:
            given = frozenset(key for key, value in experiment.varied.items() if value is not None)
            model = experiment.settings.get("model") or {}
            which = (f"group {experiment.group}", f"model {model.get('type')} {model.get('weights')}")
            kinds.setdefault(given.union(which), experiment)
        found: dict[tuple[str, str], Problem] = {}
        for experiment in kinds.values():
            for wrong in setting_problems(experiment.settings):
                found.setdefault((wrong.key, wrong.message), self.problem(experiment, wrong.key, wrong.message))
        return list(found.values())

    def _cut(self, expansion: Expansion, *, asked: int | None) -> list[Problem]:
        """A note when the file's own number leaves experiments out."""
        kept = len(expansion.experiments)
        if (
            asked is not None
            or self.max_experiments is None
            or (expansion.total is not None and expansion.total <= kept)
        ):
            return []
        total = "more" if expansion.total is None else f"{expansion.total:,}"
        file, line = self.origins.find("max_experiments", None, None)
        message = f"the file asks for the first {kept} of {total} experiments"
        return [Problem(severity="note", message=message, file=file, line=line, key="max_experiments")]


def inspect_sweep(
    source: Source, *, overrides: Overrides = (), check_model: CheckModel | None = None
) -> tuple[SweepFile | None, tuple[Problem, ...]]:
    """A sweep and its problems; no sweep where one of them is an error. A file that cannot be opened raises.

    `source` is a file, the content of one, or just a grid: a mapping without `grid_search` is a mapping of lists.
    `check_model` is called with each model's name and raises a `RequestError` for one that does not exist.
    """
    document, problems = _document(source)
    if document is None:
        return None, problems
    changes = parse_overrides(overrides)
    reader = SweepReader(document, check_model=check_model)
    spec = reader.read(changes)
    problems = (*problems, *reader.problems)
    if has_errors(problems):
        return None, problems
    sweep = SweepFile(
        document=document,
        spec=spec,
        origins=reader.origins,
        max_experiments=reader.max_experiments,
        device_ids=reader.device_ids,
        results_file=reader.results_file,
        problems=problems,
    )
    return sweep, problems


def read_sweep(source: Source, *, overrides: Overrides = (), check_model: CheckModel | None = None) -> SweepFile:
    """As `inspect_sweep`; a `RequestError` names everything that is wrong."""
    sweep, problems = inspect_sweep(source, overrides=overrides, check_model=check_model)
    raise_errors(problems)
    assert sweep is not None  # without an error there is one
    return sweep


def expand_grid(
    source: Source,
    *,
    overrides: Overrides = (),
    max_experiments: int | None = None,
    most: int = MOST_EXPERIMENTS,
    check_model: CheckModel | None = None,
    strict: bool = False,
) -> Expansion:
    """The experiments of a grid or of a sweep's file, in order, and which lists were paired and why.

    Args:
        source: A mapping of dotted keys to lists, the content of a sweep's file, or its path.
        overrides: Dotted keys with the values that replace those of the file.
        max_experiments: Take only the first ones.
        most: More experiments than this are refused unless `max_experiments` is given.
        check_model: Called with the name of each model; raises a `RequestError` for one that does not exist.
        strict: Treat warnings as errors.

    Returns:
        The `experiments`, each with its settings and identity, and the `pairings` of lists.

    Raises:
        RequestError: The file has mistakes; the message has all of them, with their lines.

    Examples:
        >>> grid = {"model.type": ["r3d_18", "s3d"], "hp.batch_size": [128, 32]}
        >>> len(brim.expand_grid(grid).experiments)
        2
    """
    _check_count(max_experiments)
    sweep = read_sweep(source, overrides=overrides, check_model=check_model)
    return sweep.expand(max_experiments=max_experiments, most=most, strict=strict)


def validate_grid(
    source: Source,
    *,
    overrides: Overrides = (),
    max_experiments: int | None = None,
    most: int = MOST_EXPERIMENTS,
    check_model: CheckModel | None = None,
    strict: bool = False,
) -> tuple[Problem, ...]:
    """Everything there is to say about a grid or a sweep's file, all at once; nothing is raised for its content.

    Args:
        source: A mapping of dotted keys to lists, the content of a sweep's file, or its path.
        overrides: Dotted keys with the values that replace those of the file.
        max_experiments: Take only the first ones.
        most: More experiments than this are a problem unless `max_experiments` is given.
        check_model: Called with the name of each model; raises a `RequestError` for one that does not exist.
        strict: Treat warnings as errors.

    Returns:
        The problems in the order of the file: errors and warnings, each with its place and a proposal.

    Examples:
        >>> [problem.severity for problem in brim.validate_grid({"hp.learning_rat": [0.1]})]
        ['error']
    """
    _check_count(max_experiments)
    sweep, problems = inspect_sweep(source, overrides=overrides, check_model=check_model)
    if sweep is not None:
        _, problems = sweep.try_expand(max_experiments=max_experiments, most=most)
    return in_order(strictly(problems) if strict else problems)


def _document(source: Source) -> tuple[Document | None, tuple[Problem, ...]]:
    if not isinstance(source, Mapping):
        return inspect_yaml(source)
    plain = plain_value(source, "")
    data = plain if "grid_search" in plain else {"grid_search": {"grid": plain}}
    return Document(file="", data=data), ()


def _check_count(max_experiments: int | None) -> None:
    if max_experiments is not None and (isinstance(max_experiments, bool) or max_experiments < 1):
        raise RequestError(f"{given('max_experiments', max_experiments)}: give a whole number from 1")


_OF_A_SWEEP = ("grid_search", "grid", "models_to_train", "max_experiments", "results_file")


def read_training_file(
    path: str | os.PathLike[str],
    *,
    overrides: Overrides = (),
    check_model: CheckModel | None = None,
    strict: bool = False,
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The settings as nested keys, and the warnings and notes; a `RequestError` names everything that is wrong."""
    settings, problems = inspect_training_file(path, overrides=overrides, check_model=check_model)
    raise_errors(strictly(problems) if strict else problems)
    assert settings is not None  # without an error there are some
    return settings, problems


def inspect_training_file(
    path: str | os.PathLike[str],
    *,
    overrides: Overrides = (),
    check_model: CheckModel | None = None,
) -> tuple[dict[str, Any] | None, tuple[Problem, ...]]:
    """The settings and every problem; no settings where one of them is an error. A list that overrides is a value."""
    document, problems = inspect_yaml(path)
    if document is None:
        return None, problems
    changes = parse_overrides(overrides)
    for key in (*document.data, *changes):
        if key.partition(".")[0] in _OF_A_SWEEP:
            message = "this is of a sweep's file, not of a training run's"
            line = document.line(key)
            wrong = Problem(
                severity="error", message=message, fix="run it with brim sweep", file=document.file, line=line, key=key
            )
            return None, (*problems, wrong)
    reader = SweepReader(document, check_model=check_model)
    spec = reader.read(changes, sweeping=False)
    settings = nest(spec.shared if spec.finish is None else spec.finish(spec.shared))
    problems = (*problems, *reader.problems)
    if reader.device_ids is not None:
        message = f"brim does not need it: {IGNORED_KEYS['gpu']}"
        line = document.line_of("gpu.device_ids")
        problems = (
            *problems,
            Problem(severity="note", message=message, file=document.file, line=line, key="gpu.device_ids"),
        )
    if has_errors(problems):
        return None, problems
    for wrong_setting in setting_problems(settings):
        file, line = reader.origins.find(wrong_setting.key, None, None)
        problems = (
            *problems,
            Problem(severity="error", message=wrong_setting.message, file=file, line=line, key=wrong_setting.key),
        )
    return (None if has_errors(problems) else settings), problems
