"""Which lists of a grid move together: by a rule, as asked, or by named groups of keys; and the reason. Pure.

The rule: more than one model, more than one batch size and as many of each are paired one to one; all else is crossed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from brim.settings.nested_keys import value_text
from brim.settings.problems import Problem, Severity
from brim.settings.train_settings import BATCH_KEY, MODEL_KEY

__all__ = ["PAIRINGS", "Columns", "GridGroup", "Pairing", "PairingChoice", "Row", "arrange"]

Pairing = Literal["auto", "zip", "product"]
PAIRINGS: tuple[Pairing, ...] = ("auto", "zip", "product")

Row = tuple[tuple[str, Any, int], ...]  # key, value, its position in its list: what one step along a column sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridGroup:
    """Lists of values that are combined with each other; `grid` is one group without a name."""

    axes: Mapping[str, tuple[Any, ...]]
    name: str | None = None
    file: str = ""
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def problem(self, severity: Severity, key: str, message: str, fix: str = "") -> Problem:
        """A problem of one of its lists."""
        return Problem(severity=severity, message=message, fix=fix, file=self.file, line=self.lines.get(key), key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairingChoice:
    """How models and batch sizes of a group were put together, and why."""

    mode: Literal["zip", "product"]
    reason: str
    keys: tuple[tuple[str, ...], ...] = ()  # those that move together
    group: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """A group ready to be multiplied out: the first column changes slowest."""

    group: GridGroup
    columns: tuple[tuple[Row, ...], ...]
    choice: PairingChoice
    problems: tuple[Problem, ...] = ()

    @property
    def count(self) -> int:
        """How many combinations there are."""
        return math.prod(len(column) for column in self.columns)

    def product(self, models: Sequence[str] = ()) -> int:
        """How many there would be with every list crossed, as they are written; with `models`, of these alone."""
        lists = dict(self.group.axes)
        if models and MODEL_KEY in lists:
            lists[MODEL_KEY] = tuple(model for model in lists[MODEL_KEY] if model in models)
        return math.prod(len(values) for values in lists.values())


def arrange(group: GridGroup, *, pairing: Pairing = "auto", zipped: Sequence[Sequence[str]] = ()) -> Columns:
    """The columns of a group: the model's first, then the batch size's, then the others in the file's order."""
    problems: list[Problem] = []
    together = _named_pairs(group, zipped, problems)
    taken = {key for keys in together for key in keys}
    mode, reason = _choose(group, pairing, taken, problems)
    if mode == "zip":
        together.append((MODEL_KEY, BATCH_KEY))
    choice = PairingChoice(
        mode="zip" if together else "product", reason=_sentence(group, together, taken, reason), keys=tuple(together),
        group=group.name,
    )  # fmt: skip
    partner = {key: keys for keys in together for key in keys}
    columns: list[tuple[Row, ...]] = []
    placed: set[str] = set()
    for key in _in_order(group.axes):
        if key in placed:
            continue
        keys = partner.get(key, (key,))
        placed.update(keys)
        columns.append(_rows(group, keys, problems))
    return Columns(group=group, columns=tuple(columns), choice=choice, problems=tuple(problems))


def _in_order(axes: Mapping[str, Any]) -> list[str]:
    first = [key for key in (MODEL_KEY, BATCH_KEY) if key in axes]
    return [*first, *(key for key in axes if key not in first)]


def _named_pairs(group: GridGroup, zipped: Sequence[Sequence[str]], problems: list[Problem]) -> list[tuple[str, ...]]:
    """The groups of `zip:` as far as this group has them; a list of one value needs no pairing, every row has it."""
    found = []
    for keys in zipped:
        lengths = {key: len(group.axes[key]) for key in keys if len(group.axes.get(key, ())) > 1}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            message = f"zip pairs lists of different length ({counts})"
            problems.append(group.problem("error", next(iter(lengths)), message, "give as many values of each"))
        elif len(lengths) > 1:
            found.append(tuple(lengths))
    return found


def _choose(
    group: GridGroup, pairing: Pairing, taken: set[str], problems: list[Problem]
) -> tuple[Literal["zip", "product"], str]:
    """Whether models and batch sizes are paired, and why."""
    models, sizes = (group.axes.get(key, ()) for key in (MODEL_KEY, BATCH_KEY))
    named = [key for key in (MODEL_KEY, BATCH_KEY) if key in taken]
    if named:
        left = [key for key in (MODEL_KEY, BATCH_KEY) if key not in taken and len(group.axes.get(key, ())) > 1]
        if left and pairing == "zip":
            message = f"pairing is zip, and zip names {named[0]} without it"
            problems.append(group.problem("error", left[0], message, f"add {left[0]} beside {named[0]}"))
        return "product", f"{left[0]} is crossed with them, because zip does not name it." if left else ""
    if len(models) < 2 or len(sizes) < 2:
        return "product", _without_two_lists(models, sizes)
    counts = f"{len(models)} models and {len(sizes)} batch sizes"
    if pairing == "product":
        return "product", f"{counts}: every model gets every batch size, because pairing is product."
    if len(models) == len(sizes):
        why = "because pairing is zip" if pairing == "zip" else "because the counts are equal (pairing: auto)"
        return "zip", f"{counts}: each model gets the batch size at its place in the list, {why}."
    if pairing == "zip":
        message = f"pairing is zip, and there are {counts}"
        problems.append(group.problem("error", BATCH_KEY, message, "give one batch size for each model"))
    else:
        message = f"{counts} cannot be paired, so every model gets every batch size"
        fix = "give one batch size for each model, or write pairing: product"
        problems.append(group.problem("warning", BATCH_KEY, message, fix))
    return "product", f"{counts}: every model gets every batch size, because the counts differ."


def _without_two_lists(models: Sequence[Any], sizes: Sequence[Any]) -> str:
    if not sizes:
        return "Nothing to pair: there is no list of batch sizes."
    if len(sizes) == 1 and len(models) > 1:
        if sizes[0] == "auto":
            return f"Nothing to pair: a batch size is planned for each of the {len(models)} models."
        return f"Nothing to pair: all {len(models)} models get the one batch size, {sizes[0]}."
    if len(sizes) == 1:
        return "Nothing to pair: there is one batch size."
    return f"Nothing to pair: {'one model' if models else 'the model'} gets each of the {len(sizes)} batch sizes."


def _sentence(group: GridGroup, together: Sequence[tuple[str, ...]], taken: set[str], reason: str) -> str:
    named = [keys for keys in together if set(keys) <= taken]
    sentences = [
        f"{', '.join(keys[:-1])} and {keys[-1]} go together ({len(group.axes[keys[0]])} of each), as zip says."
        for keys in named
    ]
    return " ".join(part for part in (*sentences, reason) if part)


def _rows(group: GridGroup, keys: tuple[str, ...], problems: list[Problem]) -> tuple[Row, ...]:
    """The steps along a column, each once: the same twice would be the same experiment twice."""
    rows: dict[str, Row] = {}
    repeated: list[str] = []
    for position, values in enumerate(zip(*(group.axes[key] for key in keys), strict=True)):
        text = value_text(values)
        if text in rows:
            repeated.append(" with ".join(str(value) for value in values))
            continue
        rows[text] = tuple((key, value, position) for key, value in zip(keys, values, strict=True))
    if repeated:
        message = f"{', '.join(dict.fromkeys(repeated))} is there more than once and is taken once"
        problems.append(group.problem("warning", keys[0], message, "remove the repeated value"))
    return tuple(rows.values())
