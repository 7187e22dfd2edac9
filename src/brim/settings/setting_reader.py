"""The settings in a file: an unknown key is reported with its nearest name, each value is checked, each has its line.

Knows the keys of a training run and those of EasyTrain's files; does not know how lists are combined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.declare import SettingKey
from brim.settings.easytrain import FOREIGN_SECTIONS, read_foreign
from brim.settings.nested_keys import Leaf, leaves, plain_value
from brim.settings.problems import Problem, Severity
from brim.settings.setting_checks import Check
from brim.settings.train_settings import MODEL_KEY, SETTING_KEYS, find_setting_key
from brim.settings.yaml_file import Document, Place

__all__ = [
    "COMMAND_LINE", "SECTIONS", "CheckModel", "CheckedSetting", "Origins", "SettingReader", "dotted", "near_key",
    "shown",
]  # fmt: skip

CheckModel = Callable[[str], object]  # raises a RequestError for a model that does not exist
COMMAND_LINE = "command line"  # where a problem stands that no file has

SECTIONS = frozenset(  # every key that has keys under it: hp, optimizer, optimizer.params, …
    key[:index] for key in SETTING_KEYS for index in range(len(key)) if key[index] == "."
)
_WEIGHTS_KEY = "model.weights"
_SHORT_FORMS = {"lr": "learning_rate", "bs": "batch_size", "wd": "weight_decay", "workers": "num_workers"}
_HEADS = sorted({key.partition(".")[0] for key in SETTING_KEYS} | FOREIGN_SECTIONS)

CheckedSetting = tuple[str, tuple[Any, ...]]  # the key as brim has it, its values as they are used


@dataclasses.dataclass
class Origins:
    """Where each setting of a sweep came from: a place in the document, or the command line."""

    document: Document
    axes: dict[tuple[str | None, str], Place] = dataclasses.field(default_factory=dict)  # by group and key
    shared: dict[str, Place] = dataclasses.field(default_factory=dict)
    overridden: set[Place] = dataclasses.field(default_factory=set)
    from_command_line: set[str] = dataclasses.field(default_factory=set)

    def find(self, key: str, group: str | None, position: int | None) -> tuple[str, int | None]:
        """File and line of a setting that an experiment has; no line where the file does not have it."""
        if key in self.from_command_line:
            return COMMAND_LINE, None
        place = self.axes.get((group, key))
        if place is not None:
            return self.at((*place, position) if position is not None else place)
        return self.at(self.shared.get(key, ()))

    def at(self, place: Place) -> tuple[str, int | None]:
        """File and line of a place."""
        if any(place[:length] in self.overridden for length in range(1, len(place) + 1)):
            return COMMAND_LINE, None
        return self.document.file, self.document.line(*place)


class SettingReader:
    """Reads settings of a file one by one, and keeps what is wrong with them."""

    def __init__(self, origins: Origins, *, check_model: CheckModel | None, own_factory: bool) -> None:
        self.origins = origins
        self.problems: list[Problem] = []
        self._check_model = check_model
        self._own_factory = own_factory
        self._models: dict[str, str] = {}  # name → what is wrong with it

    @property
    def errors(self) -> int:
        """How many errors there are so far."""
        return sum(problem.severity == "error" for problem in self.problems)

    def add_problem(self, severity: Severity, message: str, place: Place, *, key: str = "", fix: str = "") -> None:
        """Note a problem at a place of the file."""
        file, line = self.origins.at(place)
        self.problems.append(
            Problem(severity=severity, message=message, fix=fix, file=file, line=line, key=key or dotted(place))
        )

    def leaves(self, section: Mapping[str, Any], place: Place) -> list[Leaf]:
        """Every value under a section, with its dotted key."""
        try:
            return list(leaves(section))
        except RequestError as error:
            self.add_problem("error", str(error), place)
            return []

    def section(self, value: Any, place: Place) -> Mapping[str, Any]:
        """A part of the file that holds keys; nothing is an empty one."""
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        self.add_problem("error", f"it is a section of keys, not {shown(value)}", place)
        return {}

    def checked_value(self, check: Check, value: Any, place: Place) -> Any:
        """A value that is no setting of a run, checked; None where it is wrong."""
        try:
            return check(value)
        except ValueError as error:
            self.add_problem("error", f"{shown(value)}: {error}", place)
            return None

    def single_values(self, section: Mapping[str, Any], place: Place) -> dict[str, tuple[Any, Place]]:
        """The settings under a section, each with its place: a list is a value here."""
        found: dict[str, tuple[Any, Place]] = {}
        for key, value, path in self.leaves(section, place):
            at = (*place, *path)
            empty = value in (None, {}) and (key in SECTIONS or key in FOREIGN_SECTIONS)
            if empty or (value is None and not _takes_nothing(key)):
                continue  # everything under it is commented out
            setting = self.check(key, [value], at)
            if setting is None:
                continue
            if setting[0] in found:
                self.add_problem("error", f"{setting[0]} is there twice", at, key=key, fix="keep one of them")
            found[setting[0]] = (setting[1][0], at)
        return found

    def check(self, key: str, values: Sequence[Any], place: Place, *, listed: bool = False) -> CheckedSetting | None:
        """The key as brim has it and its values, checked; None where it is left out or something is wrong.

        `listed`: the values are items of a list at that place, and each has a line of its own.
        """
        translated = read_foreign(key, values, own_factory=self._own_factory)
        if translated.severity is not None:
            self.add_problem(translated.severity, translated.message, place, key=key)
        if translated.key is None:
            return None
        row = find_setting_key(translated.key)
        if row is None:
            self._add_unknown(translated.key, translated.values, place)
            return None
        checked = []
        for index, value in enumerate(translated.values):
            at = (*place, index) if listed else place
            message, used = self._check(row, translated.key, value)
            if message:
                self.add_problem("error", message, at, key=key, fix="" if listed else _place_of_lists(value))
            checked.append((message, used))
        if any(message for message, _ in checked):
            return None
        return translated.key, tuple(used for _, used in checked)

    def _check(self, row: SettingKey, key: str, value: Any) -> tuple[str, Any]:
        """What is wrong with a value, or nothing, and the value as it is used."""
        try:
            used = row.check(plain_value(value, key))
        except ValueError as error:
            return f"{shown(value)}: {error}", None
        except RequestError as error:
            return str(error).removeprefix(f"{key}: "), None
        if key == MODEL_KEY and self._check_model is not None:
            if used not in self._models:
                self._models[used] = _complaint(self._check_model, used)
            return self._models[used], used
        if key == _WEIGHTS_KEY and used not in ("none", "auto") and not Path(used).expanduser().is_file():
            return f"{shown(used)}: there is no such file; give none, auto or a file of weights", used
        return "", used

    def _add_unknown(self, key: str, values: Sequence[Any], place: Place) -> None:
        if key in SECTIONS:
            below = [other.removeprefix(f"{key}.") for other in SETTING_KEYS if other.startswith(f"{key}.")]
            value = next((value for value in values if not isinstance(value, Mapping)), values[0])
            fix = _place_of_lists(value) or ("" if "*" in below else f"write {key}.{below[0]}")
            self.add_problem("error", f"it is a section of keys, not {shown(value)}", place, key=key, fix=fix)
            return
        self.add_problem("error", f"there is no such key{near_key(key)}", place, key=key)

    def add_unknown_section(self, name: str, place: Place, known: Iterable[str]) -> None:
        """Note a top-level key that means nothing, once for all that stands under it."""
        self.add_problem(
            "error", f"there is no such key{nearest_names(name, known, count=1) or near_key(name)}", place, key=name
        )

    @staticmethod
    def knows_section(name: str) -> bool:
        """Whether a top-level key may hold settings."""
        return name.partition(".")[0] in _HEADS


def near_key(key: str) -> str:
    """Names like it: first those with the same last word, then those spelled alike."""
    known = [other.removesuffix(".*") for other in SETTING_KEYS]
    last = key.rpartition(".")[2]
    last = _SHORT_FORMS.get(last.lower(), last)
    same = [other for other in known if other.rpartition(".")[2] == last]
    if same:
        return f"; did you mean {', '.join(same)}?"
    by_last = {other.rpartition(".")[2]: other for other in known}
    near = nearest_names(key, known, count=1)
    if near:
        return near
    words = nearest_names(last, by_last, count=1).removeprefix("; did you mean ").removesuffix("?")
    return f"; did you mean {by_last[words]}?" if words else ""


def dotted(place: Place) -> str:
    """A place as a key for people."""
    return ".".join(str(part) for part in place if not isinstance(part, int))


def shown(value: Any) -> str:
    """A value in a message, cut short."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}…"


def _takes_nothing(key: str) -> bool:
    """Whether null is a value of the key; a key that brim does not have is checked anyway."""
    row = find_setting_key(key)
    if row is None:
        return True
    try:
        row.check(None)
    except ValueError:
        return False
    return True


def _place_of_lists(value: Any) -> str:
    """Where a list belongs that stands where one value is wanted; nothing for other values."""
    wanted = isinstance(value, list) and bool(value)
    return "lists of values to try go under grid_search.grid (brim sweep)" if wanted else ""


def _complaint(check: CheckModel, model: str) -> str:
    try:
        check(model)
    except RequestError as error:
        return str(error)
    return ""
