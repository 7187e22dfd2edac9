"""The lists of a sweep's file: `grid`, or the named `groups`, with every key and value checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.settings.easytrain_keys import read_foreign
from brim.settings.grid_pairing import GridGroup
from brim.settings.nested_keys import conflicting_keys, flatten
from brim.settings.sweep_settings import SECTIONS, SettingReader, Settled
from brim.settings.yaml_file import Place

__all__ = ["Lists", "check_conflicts", "finished_group", "read_lists", "settle_list"]


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
            reader.tell("error", "it has no values", place, key=key, fix="give a list, or remove the key")
            continue
        listed = isinstance(value, list)
        values = value if listed else [value]
        settled = settle_list(reader, key, values, place, listed=listed)
        if settled is None:
            continue
        if settled[0] in lists.axes:
            reader.tell("error", f"{settled[0]} is there twice", place, key=key, fix="keep one of them")
        lists.axes[settled[0]] = settled[1]
        lists.places[settled[0]] = place
    return lists


def settle_list(
    reader: SettingReader, key: str, values: Sequence[Any], place: Place, *, listed: bool
) -> Settled | None:
    """As `SettingReader.settle`, for values that may be whole sections."""
    if key in SECTIONS and all(isinstance(item, Mapping) and item for item in values):
        return _list_of_sections(reader, key, values, place)
    return reader.settle(key, values, place, listed=listed)


def _list_of_sections(reader: SettingReader, key: str, values: Sequence[Any], place: Place) -> Settled | None:
    """`optimizer: [{name: adam}, {name: sgd, params: {momentum: 0.9}}]`: each item is a part of the settings."""
    found = []
    for index, section in enumerate(values):
        inside: dict[str, Any] = {}
        for name, value, path in reader.leaves(section, (*place, index)):
            at = (*place, index, *path)
            settled = reader.settle(f"{key}.{name}", [value], at)
            if settled is None:
                continue
            if not settled[0].startswith(f"{key}."):
                reader.tell("error", f"{settled[0]} does not stand under {key}", at, key=f"{key}.{name}")
            inside[settled[0].removeprefix(f"{key}.")] = settled[1][0]
        found.append(inside)
    return (key, tuple(found)) if all(found) else None


def check_conflicts(reader: SettingReader, groups: Sequence[Lists], shared: Mapping[str, Any]) -> None:
    """`a` and `a.b`: each may be right, both together cannot."""
    for lists in groups:
        owners: dict[str, str] = {}
        for key, values in lists.axes.items():
            for leaf in _leaf_keys(key, values):
                if leaf in owners:
                    reader.tell("error", f"{leaf} is in the list of {owners[leaf]} as well", lists.places[key], key=key)
                owners[leaf] = key
        for short, long in conflicting_keys([*owners, *(key for key in shared if key not in owners)]):
            place = lists.places.get(owners.get(long, ""), reader.origins.shared.get(long, ()))
            reader.tell("error", f"{short} has a value, so nothing can be under it", place, key=long)


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
