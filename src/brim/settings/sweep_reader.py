"""A sweep's document to a `GridSpec`: its sections are shared settings, `grid_search` holds what varies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError, nearest_names
from brim.settings.easytrain import NAME_KEY, convert_schedule, is_foreign_schedule
from brim.settings.experiment_ids import MODEL_KEY
from brim.settings.grid import GridSpec, Inclusion
from brim.settings.nested_keys import flatten, leaves
from brim.settings.problems import Problem
from brim.settings.setting_checks import text, whole
from brim.settings.setting_reader import COMMAND_LINE, SECTIONS, CheckModel, Origins, SettingReader, near_key, shown
from brim.settings.sweep_lists import (
    GRID,
    Lists,
    check_conflicts,
    check_list,
    finished_group,
    read_exclusions,
    read_inclusions,
    read_lists,
    read_pairing,
    read_repeats,
    read_zip,
)
from brim.settings.train_settings import IGNORED_KEYS
from brim.settings.yaml_file import Document, Place

__all__ = ["SweepReader"]

_FILTERS = ("pairing", "zip", "exclude", "include", "repeat", "seeds")
_GRID_KEYS = ("grid", "groups", "fixed", *_FILTERS)
_OF_THE_SWEEP = ("models_to_train", "max_experiments", "results_file")
_NOT_NEEDED = ("continue_on_error", "parallel_jobs", "save_results")  # also found under grid_search
_MODEL_NAMES = (MODEL_KEY, "model.name", "model_name", "model_type")


class SweepReader:
    """Reads a document once; `problems` and the other fields are complete when `read` has returned."""

    def __init__(self, document: Document, *, check_model: CheckModel | None = None) -> None:
        self.document = document
        self.origins = Origins(document)
        self.max_experiments: int | None = None
        self.device_ids: tuple[int, ...] | None = None
        self.results_file: str | None = None
        self.settings = SettingReader(
            self.origins, check_model=check_model, own_factory=_has_own_factory(document.data)
        )
        self._models: tuple[str, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        """Everything found so far."""
        return self.settings.problems

    def read(self, overrides: Mapping[str, Any], *, sweeping: bool = True) -> GridSpec:
        """The grid; of use only when no problem is an error. Without `sweeping`, a list that overrides is a value."""
        data, changes = self._split_overrides(overrides)
        shared = self._read_sections(data)
        grid = self.settings.section(data.get(GRID), (GRID,))
        groups = self._read_groups(grid, older=data.get("grid"))
        shared |= self._read_fixed(grid, groups)
        include = read_inclusions(self.settings, grid.get("include"))
        exclude = read_exclusions(self.settings, grid.get("exclude"))
        include = self._override(changes, groups, shared, include, sweeping=sweeping)
        check_conflicts(self.settings, groups, shared)
        return GridSpec(
            groups=tuple(finished_group(self.settings, lists) for lists in groups),
            shared=shared,
            pairing=read_pairing(self.settings, grid.get("pairing")),
            zipped=read_zip(self.settings, grid.get("zip"), groups),
            exclude=exclude,
            include=tuple(include),
            seeds=read_repeats(self.settings, grid, groups, shared),
            models=self._models,
            file=self.document.file,
            models_line=self.document.line("models_to_train"),
            finish=self._finish(groups, shared, include),
        )

    def _finish(
        self, groups: Sequence[Lists], shared: Mapping[str, Any], include: Sequence[Inclusion]
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
        self.settings.add_problem("note", message, place or self.origins.shared.get(NAME_KEY, ()), key="scheduler")
        return convert_schedule

    def _read_sections(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that every experiment has; and what the file asks of the sweep itself."""
        settings: dict[str, Any] = {}
        for name, value in data.items():
            if name in (GRID, "grid"):
                continue
            if name in _OF_THE_SWEEP:
                self._read_sweep_key(name, value, (name,))
            elif name == "gpu.device_ids":
                self.device_ids = self._read_devices(value, (name,))
            elif name in _GRID_KEYS:
                self.settings.add_problem("error", f"it belongs under {GRID}", (name,))
            elif name in IGNORED_KEYS and name not in ("gpu", "multi_gpu"):
                self.settings.add_problem("note", f"brim does not need it: it is {IGNORED_KEYS[name]}", (name,))
            elif self.settings.knows_section(name):
                settings[name] = self._without_devices(value) if name == "gpu" else value
            else:
                known = (GRID, *_OF_THE_SWEEP, *sorted(SECTIONS), "task", "gpu", "multi_gpu")
                self.settings.add_unknown_section(name, (name,), known)
        found = self.settings.single_values(settings, ())
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
            self.settings.add_problem("error", message, place, fix='write 0, "0,1" or [0, 1]')
            return None
        return found

    def _read_sweep_key(self, name: str, value: Any, place: Place) -> None:
        """What the file asks of the sweep itself."""
        if value is None:
            return
        if name == "max_experiments":
            self.max_experiments = self.settings.checked_value(whole(1), value, place)
            self.origins.shared[name] = place
        elif name == "results_file":
            self.results_file = self.settings.checked_value(text(), value, place)
        else:
            models = [value] if isinstance(value, str) else value
            if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
                self.settings.add_problem("error", f"{shown(value)}: it must be a list of models", place)
                return
            if not models:
                self.settings.add_problem("note", "it is empty: every model of the grid is trained", place)
            self._models = tuple(dict.fromkeys(models))

    def _read_groups(self, grid: Mapping[str, Any], *, older: Any) -> list[Lists]:
        """The lists: one group without a name, or the named ones."""
        add_problem = self.settings.add_problem
        loose: dict[str, Any] = {}  # lists directly under grid_search, as the oldest files have them
        for key, value in grid.items():
            if key in _OF_THE_SWEEP:
                self._read_sweep_key(key, value, (GRID, key))
            elif key in _NOT_NEEDED:
                self.settings.check(key, [value], (GRID, key))
            elif key not in _GRID_KEYS and "." in key and self.settings.knows_section(key):
                loose[key] = value
            elif key not in _GRID_KEYS and self.settings.knows_section(key):
                add_problem("error", f"it belongs under {GRID}.grid", (GRID, key))
            elif key not in _GRID_KEYS:
                add_problem(
                    "error",
                    f"there is no such key{nearest_names(key, _GRID_KEYS, count=1) or near_key(key)}",
                    (GRID, key),
                )
        named = self.settings.section(grid.get("groups"), (GRID, "groups"))
        plain = self.settings.section(grid.get("grid"), (GRID, "grid"))
        before = self.settings.section(older, ("grid",))
        if named and (plain or loose or before):
            add_problem("error", "grid and groups are both given", (GRID, "groups"), fix="make the grid one more group")
        if named:
            return [self._read_group(name, section) for name, section in named.items()]
        if not (plain or loose or before) and grid.get("include"):
            return []
        lists = read_lists(self.settings, plain, Lists(None, (GRID, "grid")))
        for place, section in (((GRID,), loose), (("grid",), before)):
            if section:
                add_problem("note", f"read as {GRID}.grid", (*place, next(iter(section))))
                read_lists(self.settings, section, dataclasses.replace(lists, place=place))
        return [lists]

    def _read_group(self, name: str, section: Any) -> Lists:
        lists = Lists(name, (GRID, "groups", name))
        if not isinstance(section, Mapping) or not section:
            self.settings.add_problem("error", "a group is a mapping of keys to lists", lists.place)
            return lists
        return read_lists(self.settings, section, lists)

    def _read_fixed(self, grid: Mapping[str, Any], groups: Sequence[Lists]) -> dict[str, Any]:
        place: Place = (GRID, "fixed")
        fixed = self.settings.single_values(self.settings.section(grid.get("fixed"), place), place)
        for key, (_, at) in fixed.items():
            self.origins.shared[key] = at
            if any(key in lists.axes for lists in groups):
                message = "it is fixed, and a list of the grid as well"
                self.settings.add_problem("error", message, at, key=key, fix="keep one of them")
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
            elif key == "gpu.device_ids" or (head == GRID and name in _FILTERS):
                self.origins.overridden.add((head, name))
                section = data.get(head)
                data[head] = {**(section if isinstance(section, Mapping) else {}), name: value}
            elif head == GRID:
                self.origins.overridden.add((key,))
                fix = "name the setting alone, such as hp.learning_rate=0.01"
                self.settings.add_problem("error", "it cannot be given here", (key,), fix=fix)
            else:
                rest[key] = value
        return data, rest

    def _override(
        self,
        changes: Mapping[str, Any],
        groups: Sequence[Lists],
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
                self.settings.add_problem("error", "it has no values", (key,))
                continue
            setting = check_list(self.settings, key, value if listed else [value], (key,), listed=listed)
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
