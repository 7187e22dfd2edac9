"""A sweep's document to a `GridSpec`: its sections are shared settings, `grid_search` holds what varies.

That is `grid`, or the named `groups`; and what the file says about them: pairing, zip, exclude, include, repeat, seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.easytrain import NAME_KEY, convert_schedule, is_foreign_schedule, read_foreign
from brim.settings.grid import Exclusion, GridSpec, Inclusion
from brim.settings.grid_pairing import PAIRINGS, GridGroup, Pairing
from brim.settings.nested_keys import conflicting_keys, flatten, leaves
from brim.settings.problems import Problem
from brim.settings.setting_checks import MOST_SEED, text, whole
from brim.settings.setting_reader import (
    COMMAND_LINE,
    SECTIONS,
    CheckedSetting,
    CheckModel,
    Origins,
    SettingReader,
    near_key,
    shown,
)
from brim.settings.train_settings import IGNORED_KEYS, MODEL_KEY, SEED_KEY
from brim.settings.yaml_file import Document, Place

__all__ = ["SweepReader"]

_GRID = "grid_search"
_FILTERS = ("pairing", "zip", "exclude", "include", "repeat", "seeds")
_GRID_KEYS = ("grid", "groups", "fixed", *_FILTERS)
_OF_THE_SWEEP = ("models_to_train", "max_experiments", "results_file")
_NOT_NEEDED = ("continue_on_error", "parallel_jobs", "save_results")  # also found under grid_search
_MOST_SEEDS = 100_000
_MODEL_NAMES = (MODEL_KEY, "model.name", "model_name", "model_type")


class SweepReader(SettingReader):
    """Reads a document once; `problems` and the other fields are complete when `read` has returned."""

    def __init__(self, document: Document, *, check_model: CheckModel | None = None) -> None:
        super().__init__(Origins(document), check_model=check_model, own_factory=_has_own_factory(document.data))
        self.document = document
        self.max_experiments: int | None = None
        self.device_ids: tuple[int, ...] | None = None
        self.results_file: str | None = None
        self._wanted_models: tuple[str, ...] = ()

    def read(self, overrides: Mapping[str, Any], *, sweeping: bool = True) -> GridSpec:
        """The grid; of use only when no problem is an error. Without `sweeping`, a list that overrides is a value."""
        data, changes = self._split_overrides(overrides)
        shared = self._read_sections(data)
        grid = self.section(data.get(_GRID), (_GRID,))
        groups = self._read_groups(grid, older=data.get("grid"))
        shared |= self._read_fixed(grid, groups)
        include = _read_inclusions(self, grid.get("include"))
        exclude = _read_exclusions(self, grid.get("exclude"))
        include = self._override(changes, groups, shared, include, sweeping=sweeping)
        _check_conflicts(self, groups, shared)
        return GridSpec(
            groups=tuple(_finished_group(self, lists) for lists in groups),
            shared=shared,
            pairing=_read_pairing(self, grid.get("pairing")),
            zipped=_read_zip(self, grid.get("zip"), groups),
            exclude=exclude,
            include=tuple(include),
            seeds=_read_repeats(self, grid, groups, shared),
            models=self._wanted_models,
            file=self.document.file,
            models_line=self.document.line("models_to_train"),
            finish=self._finish(groups, shared, include),
        )

    def _finish(
        self, groups: Sequence[_Lists], shared: Mapping[str, Any], include: Sequence[Inclusion]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """What turns schedulers as EasyTrain describes them into brim's, where a file has such."""
        sets: list[Mapping[str, Any]] = [shared, *(one.settings for one in include)]
        keys = {key for values in (*sets, *(lists.axes for lists in groups)) for key in values}
        names = [values.get(NAME_KEY) for values in sets]
        names += [name for lists in groups for name in lists.axes.get(NAME_KEY, ())]
        if not is_foreign_schedule(keys, names):
            return None
        place = next((lists.places[NAME_KEY] for lists in groups if NAME_KEY in lists.places), ())
        message = (
            "schedulers are read as EasyTrain has them: each takes its own of the parameters, a warm-up comes first"
        )
        self.add_problem("note", message, place or self.origins.shared.get(NAME_KEY, ()), key="scheduler")
        return convert_schedule

    def _read_sections(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that every experiment has; and what the file asks of the sweep itself."""
        settings: dict[str, Any] = {}
        for name, value in data.items():
            if name in (_GRID, "grid"):
                continue
            if name in _OF_THE_SWEEP:
                self._read_sweep_key(name, value, (name,))
            elif name == "gpu.device_ids":
                self.device_ids = self._read_devices(value, (name,))
            elif name in _GRID_KEYS:
                self.add_problem("error", f"it belongs under {_GRID}", (name,))
            elif name in IGNORED_KEYS and name not in ("gpu", "multi_gpu"):
                self.add_problem("note", f"brim does not need it: it is {IGNORED_KEYS[name]}", (name,))
            elif self.knows_section(name):
                settings[name] = self._without_devices(value) if name == "gpu" else value
            else:
                known = (_GRID, *_OF_THE_SWEEP, *sorted(SECTIONS), "task", "gpu", "multi_gpu")
                self.add_unknown_section(name, (name,), known)
        found = self.single_values(settings, ())
        self.origins.shared |= {key: place for key, (_, place) in found.items()}
        return {key: value for key, (value, _) in found.items()}

    def _without_devices(self, section: Any) -> Any:
        """`gpu` without `device_ids`, which is the sweep's."""
        if not isinstance(section, Mapping) or "device_ids" not in section:
            return section
        self.device_ids = self._read_devices(section["device_ids"], ("gpu", "device_ids"))
        return {name: value for name, value in section.items() if name != "device_ids"}

    def _read_devices(self, value: Any, place: Place) -> tuple[int, ...] | None:
        """`0`, `"2,3"` or `[2, 3]`."""
        if value is None:
            return None
        parts = value if isinstance(value, list) else str(value).split(",")
        try:
            found = tuple(int(str(part)) for part in parts)
        except ValueError:
            found = ()
        if not found or min(found) < 0 or len(set(found)) < len(found):
            message = f"{shown(value)}: it must be numbers of GPUs"
            self.add_problem("error", message, place, fix='write 0, "0,1" or [0, 1]')
            return None
        return found

    def _read_sweep_key(self, name: str, value: Any, place: Place) -> None:
        """What the file asks of the sweep itself."""
        if value is None:
            return
        if name == "max_experiments":
            self.max_experiments = self.checked_value(whole(1), value, place)
            self.origins.shared[name] = place
        elif name == "results_file":
            self.results_file = self.checked_value(text(), value, place)
        else:
            models = [value] if isinstance(value, str) else value
            if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
                self.add_problem("error", f"{shown(value)}: it must be a list of models", place)
                return
            if not models:
                self.add_problem("note", "it is empty: every model of the grid is trained", place)
            self._wanted_models = tuple(dict.fromkeys(models))

    def _read_groups(self, grid: Mapping[str, Any], *, older: Any) -> list[_Lists]:
        """The lists: one group without a name, or the named ones."""
        loose: dict[str, Any] = {}  # lists directly under grid_search, as the oldest files have them
        for key, value in grid.items():
            if key in _OF_THE_SWEEP:
                self._read_sweep_key(key, value, (_GRID, key))
            elif key in _NOT_NEEDED:
                self.check(key, [value], (_GRID, key))
            elif key not in _GRID_KEYS and "." in key and self.knows_section(key):
                loose[key] = value
            elif key not in _GRID_KEYS and self.knows_section(key):
                self.add_problem("error", f"it belongs under {_GRID}.grid", (_GRID, key))
            elif key not in _GRID_KEYS:
                self.add_problem(
                    "error",
                    f"there is no such key{nearest_names(key, _GRID_KEYS, count=1) or near_key(key)}",
                    (_GRID, key),
                )
        named = self.section(grid.get("groups"), (_GRID, "groups"))
        plain = self.section(grid.get("grid"), (_GRID, "grid"))
        before = self.section(older, ("grid",))
        if named and (plain or loose or before):
            self.add_problem(
                "error", "grid and groups are both given", (_GRID, "groups"), fix="make the grid one more group"
            )
        if named:
            return [self._read_group(name, section) for name, section in named.items()]
        if not (plain or loose or before) and grid.get("include"):
            return []
        lists = _read_lists(self, plain, _Lists(None, (_GRID, "grid")))
        for place, section in (((_GRID,), loose), (("grid",), before)):
            if section:
                self.add_problem("note", f"read as {_GRID}.grid", (*place, next(iter(section))))
                _read_lists(self, section, dataclasses.replace(lists, place=place))
        return [lists]

    def _read_group(self, name: str, section: Any) -> _Lists:
        lists = _Lists(name, (_GRID, "groups", name))
        if not isinstance(section, Mapping) or not section:
            self.add_problem("error", "a group is a mapping of keys to lists", lists.place)
            return lists
        return _read_lists(self, section, lists)

    def _read_fixed(self, grid: Mapping[str, Any], groups: Sequence[_Lists]) -> dict[str, Any]:
        place: Place = (_GRID, "fixed")
        fixed = self.single_values(self.section(grid.get("fixed"), place), place)
        for key, (_, at) in fixed.items():
            self.origins.shared[key] = at
            if any(key in lists.axes for lists in groups):
                message = "it is fixed, and a list of the grid as well"
                self.add_problem("error", message, at, key=key, fix="keep one of them")
        return {key: value for key, (value, _) in fixed.items()}

    def _split_overrides(self, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The data with the changes of the sweep itself made, and the changes of settings, which come later."""
        data = dict(self.document.data)
        rest: dict[str, Any] = {}
        for key, value in overrides.items():
            head, _, name = key.partition(".")
            if key in _OF_THE_SWEEP:
                self.origins.overridden.add((key,))
                data[key] = value
            elif key == "gpu.device_ids" or (head == _GRID and name in _FILTERS):
                self.origins.overridden.add((head, name))
                section = data.get(head)
                data[head] = {**(section if isinstance(section, Mapping) else {}), name: value}
            elif head == _GRID:
                self.origins.overridden.add((key,))
                fix = "name the setting alone, such as hp.learning_rate=0.01"
                self.add_problem("error", "it cannot be given here", (key,), fix=fix)
            else:
                rest[key] = value
        return data, rest

    def _override(
        self,
        changes: Mapping[str, Any],
        groups: Sequence[_Lists],
        shared: dict[str, Any],
        include: list[Inclusion],
        *,
        sweeping: bool,
    ) -> list[Inclusion]:
        """Put settings from the command line in place of the file's, its lists among them."""
        try:
            flat = flatten(changes)
        except RequestError as error:
            self.problems.append(Problem(severity="error", file=COMMAND_LINE, message=str(error)))
            return include
        for key, value in flat.items():
            self.origins.overridden.add((key,))
            listed = sweeping and isinstance(value, list)
            if listed and not value:
                self.add_problem("error", "it has no values", (key,))
                continue
            setting = _check_list(self, key, value if listed else [value], (key,), listed=listed)
            if setting is None:
                continue
            name, values = setting
            self.origins.from_command_line.add(name)
            for lists in groups:
                if listed or name in lists.axes:
                    lists.axes[name], lists.places[name] = values, (key,)
            if listed:
                shared.pop(name, None)
            else:
                shared[name] = values[0]
                include = [dataclasses.replace(one, settings={**one.settings, name: values[0]}) for one in include]
        return include


def _has_own_factory(data: Mapping[str, Any]) -> bool:
    """Whether any model of the file is made by the user's own code."""
    try:
        found = list(leaves(data))
    except RequestError:
        return False  # reported where it is read
    named = [value for key, value, _ in found if key.endswith(_MODEL_NAMES)]
    flat = [item for value in named for item in (value if isinstance(value, list) else [value])]
    return any(isinstance(model, str) and model.startswith("py:") for model in flat)


# -------------------------------------------------------------------------------------- what varies, and how


@dataclasses.dataclass
class _Lists:
    """The lists of one group while they are read."""

    name: str | None
    place: Place
    axes: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    places: dict[str, Place] = dataclasses.field(default_factory=dict)
    named: set[str] = dataclasses.field(default_factory=set)  # every key, also one whose values are wrong


def _read_lists(reader: SettingReader, section: Mapping[str, Any], lists: _Lists) -> _Lists:
    """The lists of a section, into `lists`; a single value is a list of one."""
    for key, value, path in reader.leaves(section, lists.place):
        place = (*lists.place, *path)
        lists.named.add(read_foreign(key, ()).key or key)
        if value in (None, [], {}):
            reader.add_problem("error", "it has no values", place, key=key, fix="give a list, or remove the key")
            continue
        listed = isinstance(value, list)
        values = value if listed else [value]
        setting = _check_list(reader, key, values, place, listed=listed)
        if setting is None:
            continue
        if setting[0] in lists.axes:
            reader.add_problem("error", f"{setting[0]} is there twice", place, key=key, fix="keep one of them")
        lists.axes[setting[0]] = setting[1]
        lists.places[setting[0]] = place
    return lists


def _check_list(
    reader: SettingReader, key: str, values: Sequence[Any], place: Place, *, listed: bool
) -> CheckedSetting | None:
    """As `SettingReader.check`, for values that may be whole sections."""
    if key in SECTIONS and all(isinstance(item, Mapping) and item for item in values):
        return _list_of_sections(reader, key, values, place)
    return reader.check(key, values, place, listed=listed)


def _list_of_sections(reader: SettingReader, key: str, values: Sequence[Any], place: Place) -> CheckedSetting | None:
    """`optimizer: [{name: adam}, {name: sgd, params: {momentum: 0.9}}]`: each item is a part of the settings."""
    found = []
    for index, section in enumerate(values):
        inside: dict[str, Any] = {}
        for name, value, path in reader.leaves(section, (*place, index)):
            at = (*place, index, *path)
            setting = reader.check(f"{key}.{name}", [value], at)
            if setting is None:
                continue
            if not setting[0].startswith(f"{key}."):
                reader.add_problem("error", f"{setting[0]} is no key of {key}", at, key=f"{key}.{name}")
            inside[setting[0].removeprefix(f"{key}.")] = setting[1][0]
        found.append(inside)
    return (key, tuple(found)) if all(found) else None


def _check_conflicts(reader: SettingReader, groups: Sequence[_Lists], shared: Mapping[str, Any]) -> None:
    """`a` and `a.b`: each may be right, both together cannot."""
    for lists in groups:
        owners: dict[str, str] = {}
        for key, values in lists.axes.items():
            for leaf in _leaf_keys(key, values):
                if leaf in owners:
                    reader.add_problem(
                        "error", f"{leaf} is in the list of {owners[leaf]} as well", lists.places[key], key=key
                    )
                owners[leaf] = key
        for short, long in conflicting_keys([*owners, *(key for key in shared if key not in owners)]):
            place = lists.places.get(owners.get(long, ""), reader.origins.shared.get(long, ()))
            reader.add_problem("error", f"{short} has a value, so nothing can be under it", place, key=long)


def _leaf_keys(key: str, values: Sequence[Any]) -> list[str]:
    """The keys that a list sets: one, or those of all its sections."""
    if key not in SECTIONS:
        return [key]
    return list(dict.fromkeys(f"{key}.{name}" for value in values for name in flatten(value)))


def _finished_group(reader: SettingReader, lists: _Lists) -> GridGroup:
    """The group as it is expanded; from here on its places are those of its experiments."""
    lines = {}
    for key, place in lists.places.items():
        reader.origins.axes[(lists.name, key)] = place
        line = reader.origins.at(place)[1]
        if line is not None:
            lines[key] = line
    return GridGroup(axes=lists.axes, name=lists.name, file=reader.origins.document.file, lines=lines)


def _read_pairing(reader: SettingReader, asked: Any) -> Pairing:
    """`auto`, `zip` or `product`; nothing is auto."""
    for pairing in PAIRINGS:
        if (asked or "auto") == pairing:
            return pairing
    near = nearest_names(str(asked), PAIRINGS, count=1)
    reader.add_problem("error", f"{shown(asked)}: it must be one of {', '.join(PAIRINGS)}{near}", (_GRID, "pairing"))
    return "auto"


def _read_zip(reader: SettingReader, asked: Any, groups: Sequence[_Lists]) -> tuple[tuple[str, ...], ...]:
    """Groups of keys whose lists go together; every key must have a list somewhere."""
    place: Place = (_GRID, "zip")
    if asked is None:
        return ()
    if isinstance(asked, list) and asked and all(isinstance(key, str) for key in asked):
        asked = [asked]  # one group, written without the inner brackets
    if not isinstance(asked, list) or not all(isinstance(keys, list) and len(keys) > 1 for keys in asked):
        fix = "write zip: [[model.type, hp.batch_size]]"
        reader.add_problem("error", "it must be a list of groups of two or more keys", place, fix=fix)
        return ()
    present = {key for lists in groups for key in (*lists.axes, *lists.named)}
    found: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for index, keys in enumerate(asked):
        names = tuple(read_foreign(str(key), ()).key or str(key) for key in keys)
        for position, name in enumerate(names):
            at = (*place, index, position)
            if name not in present:
                reader.add_problem(
                    "error", f"{name} is no list of the grid{nearest_names(name, sorted(present), count=1)}", at
                )
            elif name in taken:
                reader.add_problem("error", f"{name} is named twice", at, fix="a list goes with one group of others")
            taken.add(name)
        found.append(names)
    return tuple(found)


def _read_exclusions(reader: SettingReader, asked: Any) -> tuple[Exclusion, ...]:
    """Combinations to drop; a list of values of a key means any of them."""
    found = []
    for place, entry in _entries(reader, asked, "exclude"):
        values: dict[str, tuple[Any, ...]] = {}
        left_out = False
        before = reader.errors
        for key, value, path in reader.leaves(entry, place):
            listed = isinstance(value, list)
            setting = reader.check(key, value if listed else [value], (*place, *path), listed=listed)
            if setting is None:
                left_out = True
            else:
                values[setting[0]] = setting[1]
        if not left_out:
            found.append(Exclusion(values=values, line=reader.origins.at(place)[1]))
        elif reader.errors == before:
            reader.add_problem("warning", "the entry has no effect: brim does not use all of its keys", place)
    return tuple(found)


def _read_inclusions(reader: SettingReader, asked: Any) -> list[Inclusion]:
    """Experiments to add."""
    found = []
    for place, entry in _entries(reader, asked, "include"):
        settings = {key: value for key, (value, _) in reader.single_values(entry, place).items()}
        found.append(Inclusion(settings=settings, line=reader.origins.at(place)[1]))
    return found


def _entries(reader: SettingReader, asked: Any, name: str) -> list[tuple[Place, Mapping[str, Any]]]:
    """The entries of a list of mappings, each with its place; one mapping alone is a list of one."""
    place: Place = (_GRID, name)
    if asked is None:
        return []
    if isinstance(asked, Mapping):
        return [(place, asked)]
    if not isinstance(asked, list):
        reader.add_problem("error", f"it must be a list of mappings, not {shown(asked)}", place)
        return []
    found: list[tuple[Place, Mapping[str, Any]]] = []
    for index, entry in enumerate(asked):
        if isinstance(entry, Mapping) and entry:
            found.append(((*place, index), entry))
        else:
            reader.add_problem("error", f"{shown(entry)}: it must be a mapping of keys and values", (*place, index))
    return found


def _read_repeats(
    reader: SettingReader, grid: Mapping[str, Any], groups: Sequence[_Lists], shared: Mapping[str, Any]
) -> tuple[int, ...]:
    """The seeds of every experiment; none where the file does not repeat. A seed from the command line comes first."""
    repeat, seeds = grid.get("repeat"), grid.get("seeds")
    place: Place = (_GRID, "seeds" if seeds is not None else "repeat")
    if repeat is None and seeds is None:
        return ()
    if repeat is not None and seeds is not None:
        reader.add_problem("error", "seeds and repeat are both given", place, fix="keep one of them")
    replaced = SEED_KEY in reader.origins.from_command_line
    if any(SEED_KEY in lists.axes for lists in groups):
        if not replaced:
            reader.add_problem("error", f"{SEED_KEY} is a list of the grid as well", place, fix="keep one of them")
        return ()
    if isinstance(seeds, list):
        found = tuple(
            reader.checked_value(whole(0, MOST_SEED), seed, (*place, index)) for index, seed in enumerate(seeds)
        )
        if not seeds or len(set(found)) < len(found):
            reader.add_problem("error", "it must be a list of different seeds", place)
        return () if replaced else found
    count = reader.checked_value(whole(1), repeat if seeds is None else seeds, place)
    if count is not None and count > _MOST_SEEDS:
        reader.add_problem("error", f"{count:,} repetitions are more than {_MOST_SEEDS:,}", place)
    first = shared.get(SEED_KEY, 0)
    if count is not None and first + count - 1 > MOST_SEED:
        reader.add_problem("error", f"{count:,} seeds from {first} on pass {MOST_SEED}, the largest", place)
    return tuple(range(first, first + count)) if count is not None and 1 < count <= _MOST_SEEDS else ()
