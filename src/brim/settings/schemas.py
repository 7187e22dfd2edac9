"""JSON Schemas of `brim train` and `brim sweep` files, for editors: made of the declarations, shipped beside them.

A schema knows each key and what it takes; what only brim can tell (whether a model exists, which lists pair) it does
not. Keys of EasyTrain's files that brim reads are allowed, unchecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from brim.settings.easytrain_keys import foreign_keys
from brim.settings.setting_checks import MOST_SEED, whole
from brim.settings.train_settings import IGNORED_KEYS, SETTING_KEYS

__all__ = ["schemas"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_ANY: Schema = {}
_FOREIGN = "foreign"  # in the definitions


def schemas() -> dict[str, str]:
    """The text of each schema by its file's name."""
    files = {"train.schema.json": _train(), "sweep.schema.json": _sweep()}
    return {name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n" for name, schema in files.items()}


def _train() -> Schema:
    return {
        "$schema": _DRAFT,
        "title": "A file of brim train",
        "description": "docs/training.md",
        **_settings(_single),
        "$defs": _definitions(),
    }


def _sweep() -> Schema:
    names = {"type": "array", "items": {"type": "string"}}
    one, lists = {"$ref": "#/$defs/settings"}, {"$ref": "#/$defs/lists"}
    of_the_sweep = {
        "models_to_train": {"anyOf": [{"type": "string"}, names]},
        "max_experiments": {"anyOf": [whole(1).schema, {"type": "null"}]},
        "results_file": {"type": ["string", "null"]},
        "continue_on_error": _ANY,
        "parallel_jobs": _ANY,
        "save_results": _ANY,
    }
    search = {
        "grid": lists,
        "groups": {"type": ["object", "null"], "additionalProperties": lists},
        "fixed": one,
        "pairing": {"enum": ["auto", "zip", "product"]},
        "zip": {"type": "array", "items": names},
        "exclude": {"type": "array", "items": lists},
        "include": {"type": "array", "items": one},
        "repeat": whole(1).schema,
        "seeds": {"type": "array", "items": whole(0, MOST_SEED).schema},
    }
    whole_file, loose = _settings(_single), _settings(_single_or_list)
    dotted = {key: schema for key, schema in loose["properties"].items() if "." in key}
    found = {**_object({**dotted, **search, **of_the_sweep}), "patternProperties": loose["patternProperties"]}
    whole_file["properties"] |= {**of_the_sweep, "grid_search": found, "grid": lists}
    return {
        "$schema": _DRAFT,
        "title": "A file of brim sweep",
        "description": "docs/sweeps.md",
        **whole_file,
        "$defs": {
            **_definitions(),
            "settings": _settings(_single, null=True),
            "lists": _settings(_single_or_list, null=True),
        },
    }


def _single(schema: Schema) -> Schema:
    return schema


def _single_or_list(schema: Schema) -> Schema:
    """The values of a grid: a list of what the key takes, or one value."""
    return {"anyOf": [{"type": "array", "items": schema}, schema]}


def _definitions() -> dict[str, Schema]:
    """What every key takes, once; keys of other tools are allowed, unchecked."""
    found: dict[str, Schema] = {_FOREIGN: {"description": "Of EasyTrain's files.", "deprecated": True}}
    for key, row in SETTING_KEYS.items():
        default = {} if row.default is None else {"default": row.default}
        found[key] = {"description": row.help, **default, **row.check.schema}
    return found


def _settings(wrap: Callable[[Schema], Schema], *, null: bool = False) -> Schema:
    """Every key, nested in its sections and written with dots."""
    sections: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    for key in foreign_keys():
        dotted[key] = _reference(_FOREIGN)
        _put(sections, key, dotted[key])
    for name in IGNORED_KEYS:
        sections[name] = {"description": IGNORED_KEYS[name]}
    for key in SETTING_KEYS:
        schema = wrap(_reference(key))
        if key in sections:  # a value here, a section there
            schema = {"anyOf": [schema, {"type": "object"}]}
        _put(sections, key, schema)
        if key.endswith("*"):
            patterns[f"^{re.escape(key.removesuffix('*'))}"] = schema
        else:
            dotted[key] = schema
    return {**_object({**dotted, **sections}, null=null), "patternProperties": patterns}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _put(sections: dict[str, Any], key: str, schema: Schema) -> None:
    """A key at its place; one that ends in `*` lets its section have any name."""
    *above, last = key.split(".")
    place, section = sections, {}
    for part in above:
        section = place.setdefault(part, _object({}, null=True))
        if "properties" not in section:  # nothing is known of what stands in it
            return
        place = section["properties"]
    if last == "*":
        section["additionalProperties"] = schema
    else:
        place[last] = schema


def _object(properties: Mapping[str, Any], *, null: bool = False) -> Schema:
    kind: Any = ["object", "null"] if null else "object"
    return {"type": kind, "properties": dict(properties), "additionalProperties": False}
