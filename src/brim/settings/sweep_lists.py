"""The lists of a sweep's file, with every key and value checked.

`grid`, or the named `groups`; and what the file says about them: pairing, zip, exclude, include, repeat, seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import nearest_names
from brim.settings.easytrain import read_foreign
from brim.settings.experiment_ids import SEED_KEY
from brim.settings.grid import Exclusion, Inclusion
from brim.settings.grid_pairing import PAIRINGS, GridGroup, Pairing
from brim.settings.nested_keys import conflicting_keys, flatten
from brim.settings.setting_checks import MOST_SEED, whole
from brim.settings.setting_reader import SECTIONS, CheckedSetting, SettingReader, shown
from brim.settings.yaml_file import Place

__all__ = [
    "GRID", "Lists", "check_conflicts", "check_list", "finished_group", "read_exclusions", "read_inclusions",
    "read_lists", "read_pairing", "read_repeats", "read_zip",
]  # fmt: skip


@dataclasses.dataclass
class Lists:
    """The lists of one group while they are read."""

    name: str | None
    place: Place
    axes: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    places: dict[str, Place] = dataclasses.field(default_factory=dict)
    named: set[str] = dataclasses.field(default_factory=set)  # every key, also one whose values are wrong


def read_lists(reader: SettingReader, section: Mapping[str, Any], lists: Lists) -> Lists:
    """The lists of a section, into `lists`; a single value is a list of one."""
    for key, value, path in reader.leaves(section, lists.place):
        place = (*lists.place, *path)
        lists.named.add(read_foreign(key, ()).key or key)
        if value in (None, [], {}):
            reader.add_problem("error", "it has no values", place, key=key, fix="give a list, or remove the key")
            continue
        listed = isinstance(value, list)
        values = value if listed else [value]
        setting = check_list(reader, key, values, place, listed=listed)
        if setting is None:
            continue
        if setting[0] in lists.axes:
            reader.add_problem("error", f"{setting[0]} is there twice", place, key=key, fix="keep one of them")
        lists.axes[setting[0]] = setting[1]
        lists.places[setting[0]] = place
    return lists


def check_list(
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
                reader.add_problem("error", f"{setting[0]} does not stand under {key}", at, key=f"{key}.{name}")
            inside[setting[0].removeprefix(f"{key}.")] = setting[1][0]
        found.append(inside)
    return (key, tuple(found)) if all(found) else None


def check_conflicts(reader: SettingReader, groups: Sequence[Lists], shared: Mapping[str, Any]) -> None:
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


def finished_group(reader: SettingReader, lists: Lists) -> GridGroup:
    """The group as it is expanded; from here on its places are those of its experiments."""
    lines = {}
    for key, place in lists.places.items():
        reader.origins.axes[(lists.name, key)] = place
        line = reader.origins.at(place)[1]
        if line is not None:
            lines[key] = line
    return GridGroup(axes=lists.axes, name=lists.name, file=reader.origins.document.file, lines=lines)


GRID = "grid_search"
_MOST_SEEDS = 100_000


def read_pairing(reader: SettingReader, asked: Any) -> Pairing:
    """`auto`, `zip` or `product`; nothing is auto."""
    for pairing in PAIRINGS:
        if (asked or "auto") == pairing:
            return pairing
    near = nearest_names(str(asked), PAIRINGS, count=1)
    reader.add_problem("error", f"{shown(asked)}: it must be one of {', '.join(PAIRINGS)}{near}", (GRID, "pairing"))
    return "auto"


def read_zip(reader: SettingReader, asked: Any, groups: Sequence[Lists]) -> tuple[tuple[str, ...], ...]:
    """Groups of keys whose lists go together; every key must have a list somewhere."""
    place: Place = (GRID, "zip")
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


def read_exclusions(reader: SettingReader, asked: Any) -> tuple[Exclusion, ...]:
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


def read_inclusions(reader: SettingReader, asked: Any) -> list[Inclusion]:
    """Experiments to add."""
    found = []
    for place, entry in _entries(reader, asked, "include"):
        settings = {key: value for key, (value, _) in reader.single_values(entry, place).items()}
        found.append(Inclusion(settings=settings, line=reader.origins.at(place)[1]))
    return found


def _entries(reader: SettingReader, asked: Any, name: str) -> list[tuple[Place, Mapping[str, Any]]]:
    """The entries of a list of mappings, each with its place; one mapping alone is a list of one."""
    place: Place = (GRID, name)
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


def read_repeats(
    reader: SettingReader, grid: Mapping[str, Any], groups: Sequence[Lists], shared: Mapping[str, Any]
) -> tuple[int, ...]:
    """The seeds of every experiment; none where the file does not repeat. A seed from the command line comes first."""
    repeat, seeds = grid.get("repeat"), grid.get("seeds")
    place: Place = (GRID, "seeds" if seeds is not None else "repeat")
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
