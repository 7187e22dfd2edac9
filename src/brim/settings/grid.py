"""Grids to experiments. Pure: no torch, no files, and no knowledge of which keys and models exist.

Lists are paired or crossed, then filtered, then multiplied by seeds; so a filter drops whole pairs. Settings are given
by dotted keys and come out nested.

    try_expand(GridSpec(groups=(GridGroup(axes={"model.type": ("r3d_18", "s3d"), "hp.batch_size": (128, 32)}),)))
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from brim.settings.caller import written
from brim.settings.grid_pairing import Columns, GridGroup, Pairing, PairingChoice, arrange
from brim.settings.nested_keys import flatten, nest, value_text
from brim.settings.problems import Problem, has_errors
from brim.settings.train_settings import BATCH_KEY, MODEL_KEY, RATE_KEY, SEED_KEY

__all__ = [
    "MOST_EXPERIMENTS", "Exclusion", "Expansion", "Experiment", "GridSpec", "Inclusion", "experiment_id",
    "try_expand",
]  # fmt: skip

MOST_EXPERIMENTS = 100_000  # without being asked for more
_MOST_COMBINATIONS = 1_000_000  # combinations that a filter may drop before a sweep of the first few is given up
_DIGITS = 12  # of an id
_MODEL_LETTERS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Experiments that have one of the values for each of the keys are dropped."""

    values: Mapping[str, tuple[Any, ...]]
    line: int | None = None

    def drops(self, flat: Mapping[str, Any]) -> bool:
        """Whether these settings match it."""
        return all(
            key in flat and any(_same_value(flat[key], value) for value in values)
            for key, values in self.values.items()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inclusion:
    """One more experiment: these settings over the shared ones."""

    settings: Mapping[str, Any]
    line: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A whole grid, every key dotted."""

    groups: tuple[GridGroup, ...] = ()
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of every experiment
    pairing: Pairing = "auto"
    zipped: tuple[tuple[str, ...], ...] = ()
    exclude: tuple[Exclusion, ...] = ()
    include: tuple[Inclusion, ...] = ()
    seeds: tuple[int, ...] = ()
    models: tuple[str, ...] = ()  # if any: only experiments of these models
    file: str = ""
    models_line: int | None = None
    finish: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None  # applied last to an experiment's settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training run: its id, its settings as nested keys, and which of them are from lists."""

    id: str
    settings: dict[str, Any]
    group: str | None = None
    varied: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dotted key → value, of the lists
    positions: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of those values in their lists, from 0
    line: int | None = None  # of an included one, in its file

    @property
    def flat(self) -> dict[str, Any]:
        """The settings by dotted keys."""
        return flatten(self.settings)

    def to_json(self) -> dict[str, Any]:
        """The experiment as plain JSON values."""
        return {"id": self.id, "group": self.group, "settings": self.settings}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expansion:
    """The experiments in their order, and how they were made."""

    experiments: tuple[Experiment, ...]
    pairings: tuple[PairingChoice, ...]  # one for each group
    problems: tuple[Problem, ...] = ()  # none is an error
    total: int | None = None  # experiments of the whole grid; None where they were too many to make
    product: int = 0  # combinations if every list were crossed

    def __len__(self) -> int:
        return len(self.experiments)

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self.experiments)

    @property
    def pairing(self) -> PairingChoice:
        """One answer for all groups; its mode is zip where any of them is paired."""
        if len(self.pairings) == 1:
            return self.pairings[0]
        keys = tuple(dict.fromkeys(itertools.chain.from_iterable(choice.keys for choice in self.pairings)))
        reasons = " ".join(f"{choice.group}: {choice.reason}" for choice in self.pairings)
        return PairingChoice(mode="zip" if keys else "product", reason=reasons or "There is no grid.", keys=keys)

    def to_json(self) -> dict[str, Any]:
        """What a preview prints, as plain JSON values, but for the schema and the forecasts."""
        return {
            "pairing": {
                "mode": self.pairing.mode,
                "reason": self.pairing.reason,
                "keys": [list(keys) for keys in self.pairing.keys],
                "groups": [
                    {"group": choice.group, "mode": choice.mode, "reason": choice.reason} for choice in self.pairings
                ],
            },
            "warnings": [problem.to_json() for problem in self.problems if problem.severity == "warning"],
            "notes": [problem.to_json() for problem in self.problems if problem.severity == "note"],
            "total": self.total,
            "product": self.product,
            "experiments": [experiment.to_json() for experiment in self.experiments],
        }


def try_expand(
    spec: GridSpec, *, max_experiments: int | None = None, most: int = MOST_EXPERIMENTS
) -> tuple[Expansion | None, tuple[Problem, ...]]:
    """The experiments of a grid, or the first `max_experiments` of them; without that number, `most` at most.

    The problems are records; there is no expansion where one of them is an error.
    """
    arranged = [arrange(group, pairing=spec.pairing, zipped=spec.zipped) for group in spec.groups]
    problems = [problem for columns in arranged for problem in columns.problems]
    seeds = max(1, len(spec.seeds))
    points = (sum(columns.count for columns in arranged) + len(spec.include)) * seeds
    if points > most and max_experiments is None:
        message = f"the grid makes {points:,} experiments, more than {most:,}"
        fix = f"shorten its lists, or give the number you want with {written('max_experiments', 'N')}"
        problems.append(Problem(severity="error", file=spec.file, key="grid_search", message=message, fix=fix))
    if has_errors(problems):
        return None, tuple(problems)
    wanted = max_experiments if points > most else None  # otherwise all are made, so that they are counted
    made = _Made(spec, limit=wanted, patience=max(most, _MOST_COMBINATIONS, wanted or 0))
    for columns in arranged:
        made.take(_points(columns, spec.shared))
    made.take(_inclusions(spec), included=True)
    problems += made.problems()
    expansion = Expansion(
        experiments=tuple(made.experiments[:max_experiments]),
        pairings=tuple(columns.choice for columns in arranged),
        problems=tuple(problems),
        total=len(made.experiments) if made.complete else None,
        product=(sum(columns.product(spec.models) for columns in arranged) + len(spec.include)) * seeds,
    )
    return (None if has_errors(problems) else expansion), tuple(problems)


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """One combination, before filters and seeds."""

    settings: dict[str, Any]
    varied: dict[str, Any]
    positions: dict[str, int] = dataclasses.field(default_factory=dict)
    group: str | None = None
    line: int | None = None


def _points(columns: Columns, shared: Mapping[str, Any]) -> Iterator[_Point]:
    for rows in itertools.product(*columns.columns):
        varied: dict[str, Any] = {}
        positions: dict[str, int] = {}
        for key, value, position in itertools.chain.from_iterable(rows):
            positions[key] = position
            if isinstance(value, Mapping) and value:  # a list of sections: `optimizer: [{name: adam}, {name: sgd}]`
                varied.update({f"{key}.{name}": item for name, item in flatten(value).items()})
            else:
                varied[key] = value
        yield _Point({**shared, **varied}, varied, positions, group=columns.group.name)


def _inclusions(spec: GridSpec) -> Iterator[_Point]:
    for inclusion in spec.include:
        varied = dict(inclusion.settings)
        yield _Point({**spec.shared, **varied}, varied, line=inclusion.line)


class _Made:
    """The experiments made so far, and what was dropped on the way."""

    def __init__(self, spec: GridSpec, *, limit: int | None, patience: int) -> None:
        self.spec = spec
        self.limit = limit  # stop when there are as many
        self.patience = patience
        self.experiments: list[Experiment] = []
        self.complete = True
        self._gave_up = False
        self._combinations = 0
        self._ids: set[str] = set()
        self._repeated: list[str] = []
        self._used = [False] * len(spec.exclude)
        self._models_seen: set[str] = set()

    def take(self, points: Iterator[_Point], *, included: bool = False) -> None:
        """Filter the points, multiply them by seeds, make experiments."""
        for point in points:
            if self.limit is not None and len(self.experiments) >= self.limit:
                self.complete = False
                return
            self._combinations += 1
            if self._combinations > self.patience:
                self.complete = False
                self._gave_up = True
                return
            if not self._kept(point.settings, included=included):
                continue
            if not self.spec.seeds or (included and SEED_KEY in point.varied):
                self._add(point)
                continue
            for seed in self.spec.seeds:
                own = {SEED_KEY: seed}
                self._add(dataclasses.replace(point, settings=point.settings | own, varied=point.varied | own))

    def _kept(self, flat: Mapping[str, Any], *, included: bool) -> bool:
        model = flat.get(MODEL_KEY)
        if self.spec.models:
            if model not in self.spec.models:
                return False
            self._models_seen.add(str(model))
        if included:
            return True
        for index, exclusion in enumerate(self.spec.exclude):
            if exclusion.drops(flat):
                self._used[index] = True
                return False
        return True

    def _add(self, point: _Point) -> None:
        settings = point.settings if self.spec.finish is None else self.spec.finish(point.settings)
        name = experiment_id(settings)
        if name in self._ids:
            self._repeated.append(name)
            return
        self._ids.add(name)
        self.experiments.append(
            Experiment(
                id=name,
                settings=nest(settings),
                group=point.group,
                varied=point.varied,
                positions=point.positions,
                line=point.line,
            )
        )

    def problems(self) -> list[Problem]:
        """What the whole expansion shows: filters without effect, repetitions, nothing left."""
        found: list[Problem] = []
        if self._gave_up:
            message = f"of the first {self.patience:,} combinations only {len(self.experiments):,} are left"
            found.append(self._problem("error", message, "shorten the lists instead of excluding so much"))
        elif not self.experiments:
            found.append(self._problem("error", "no experiment is left", "see exclude and models_to_train"))
        if self._repeated:
            count = len(self._repeated)
            what = "1 experiment comes twice and is" if count == 1 else f"{count:,} experiments come twice and are"
            found.append(self._problem("warning", f"{what} run once: {self._repeated[0]}"))
        if not self.complete:
            return found
        for exclusion, used in zip(self.spec.exclude, self._used, strict=True):
            if not used:
                excluded = ", ".join(f"{key}: {_listed(values)}" for key, values in exclusion.values.items())
                message = f"{{{excluded}}} matches no experiment"
                found.append(self._problem("warning", message, key="grid_search.exclude", line=exclusion.line))
        missing = [model for model in self.spec.models if model not in self._models_seen]
        if missing and self.experiments:
            message = f"{', '.join(missing)}: not in the grid"
            found.append(self._problem("warning", message, key="models_to_train", line=self.spec.models_line))
        return found

    def _problem(
        self, severity: Any, message: str, fix: str = "", *, key: str = "grid_search", line: int | None = None
    ) -> Problem:
        return Problem(severity=severity, message=message, fix=fix, file=self.spec.file, line=line, key=key)


def _listed(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{', '.join(map(str, values))}]"


# ------------------------------------------------------------------------------------------------------- ids
#
# The name of an experiment, from its settings alone: `r3d_18-b128-lr0.001-5d0c3f6a91b2`. The first part is for people,
# the digits decide. Neither depends on the order of the keys, on other experiments of the file, nor on its place among
# them; so a resumed or edited sweep finds the runs it has, and never takes one for another.


def experiment_id(flat: Mapping[str, Any]) -> str:
    """The id of settings given by dotted keys. Seed 0 is what a run has anyway: naming it makes no other experiment."""
    counted = flat if flat.get(SEED_KEY, 0) != 0 else {key: value for key, value in flat.items() if key != SEED_KEY}
    digits = hashlib.sha256(value_text(counted).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return "-".join([*_words(flat), digits])


def _same_value(one: Any, other: Any) -> bool:
    """Equal as settings are: 1 and 1.0 are, 1 and true are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _words(flat: Mapping[str, Any]) -> list[str]:
    words = [_model_word(flat.get(MODEL_KEY))]
    if BATCH_KEY in flat:
        size = flat[BATCH_KEY]
        words.append(f"b{size}" if isinstance(size, int) else str(size))
    if isinstance(flat.get(RATE_KEY), (int, float)):
        words.append(f"lr{flat[RATE_KEY]:g}")
    if flat.get(SEED_KEY, 0) != 0:
        words.append(f"s{flat[SEED_KEY]}")
    return [word for word in (re.sub(r"[^A-Za-z0-9_.]+", "_", word).strip("_.") for word in words) if word]


def _model_word(model: Any) -> str:
    """The last part of a model's name: no prefix, no folder."""
    if not isinstance(model, str):
        return "run"
    last = re.split(r"[:/\\]", model.rstrip(":/\\"))[-1]
    return last[:_MODEL_LETTERS] or "run"
