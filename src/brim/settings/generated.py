"""Every file that is written from the declarations.

    python -m brim.settings.generated       # in a clone of the repository

`brim/api.py` with explicit parameters, types, defaults and docstrings, so that editors and type checkers see what the
command line takes; the JSON Schemas of `brim train`, `brim sweep` and `brim forecast` files; the tables of the docs.
A test keeps each of them current.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from brim.settings.commands import COMMANDS, Command, PythonCall
from brim.settings.declare import AS_FIELD, Declared, declared
from brim.settings.easytrain import foreign_keys
from brim.settings.forecast_file import FILE_SECTIONS, forecast_file_settings
from brim.settings.setting_checks import MOST_SEED, whole
from brim.settings.shared import MODEL_HELP
from brim.settings.train_settings import IGNORED_KEYS, SETTING_KEYS

__all__ = ["KEYS_BEGIN", "KEYS_END", "generated_files", "python_module", "schemas", "settings_page", "with_keys"]

# ----------------------------------------------------------------------------------------- Python functions

WIDTH = 116
_HEAD = '''"""The commands as Python functions: the same settings, by the same names.

Written by `python -m brim.settings.generated` from the declarations in `brim.settings`; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from brim.calls import call, command_of

if TYPE_CHECKING:
    import torch
    from torch import nn

'''


_RAISES = {
    "RequestError": "The request is wrong; the message names the parameter, its value and what to do.",
    "DoesNotFitError": "Nothing fits, even at the smallest size.",
    "LostError": "The device, a child process or a rank was lost; what was finished is kept.",
}


def python_module() -> str:
    """The text of `brim.api`."""
    calls = [(command, command.python) for command in COMMANDS.values() if command.python is not None]
    calls.sort(key=lambda one: one[1].name)
    homes = sorted(call.returns.split(":") for _, call in calls)
    imports = "".join(f"    from {module} import {name}\n" for module, name in homes)
    listed = ", ".join(f'"{call.name}"' for _, call in calls) + ","
    names = textwrap.fill(listed, WIDTH, initial_indent="    ", subsequent_indent="    ")
    functions = "\n\n".join(_function(command, call) for command, call in calls)
    return f"{_HEAD}{imports}\n__all__ = [\n{names}\n]  # fmt: skip\n\n\n{functions}"


def _function(command: Command, call: PythonCall) -> str:
    settings = [
        one for one in declared(command.declaration()) if one.setting.only != "flags" and not one.setting.hidden
    ]
    placed = [one for one in settings if one.setting.argument or one.setting.positional]
    placed.sort(key=lambda one: _parameter_default(one) is not dataclasses.MISSING)
    named = [one for one in settings if one not in placed]
    lines = [f"    {_parameter(one)}," for one in placed]
    lines += ["    *,", *(f"    {_parameter(one)}," for one in named)] if named else []
    result = call.returns.partition(":")[2]
    return "\n".join(
        [
            f'@command_of("{command.name}")',
            *([f"def {call.name}(", *lines, f") -> {result}:"] if lines else [f"def {call.name}() -> {result}:"]),
            textwrap.indent(_docstring(command, call, [*placed, *named]), "    "),
            f'    result: {result} = call("{command.name}", locals())',
            "    return result",
            "",
        ]
    )


def _parameter(one: Declared) -> str:
    default = _parameter_default(one)
    return f"{one.name}: {_annotation(one)}" + ("" if default is dataclasses.MISSING else f" = {_literal(default)}")


def _parameter_default(one: Declared) -> Any:
    return one.default if one.setting.python_default is AS_FIELD else one.setting.python_default


def _annotation(one: Declared) -> str:
    own = one.type.__name__ if isinstance(one.type, type) else str(one.type)
    found = one.setting.python or one.setting.check.python or own
    return f"{found} | None" if _parameter_default(one) is None and not re.search(r"None$|^object$", found) else found


def _python_help(one: Declared) -> str:
    """The help with parameters for flags: `--max-tokens` is max_tokens, -b N batch_size=N, -o output."""
    text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), one.setting.help)
    text = re.sub(r"(?<!\w)-b\b", "batch_size", re.sub(r"(?<!\w)-b N\b", "batch_size=N", text))
    return one.setting.python_help or re.sub(r"(?<!\w)-o\b", "output", text)


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _docstring(command: Command, call: PythonCall, settings: list[Declared]) -> str:
    lines = [f'"""{command.summary}', ""]
    lines += textwrap.wrap(f"As `brim {command.name}` on the command line.", WIDTH - 4)
    lines += ["", "Args:"] if settings else []
    for one in settings:
        text = f"{one.name}: {_python_help(one)}"
        lines += textwrap.wrap(text, WIDTH - 8, initial_indent="    ", subsequent_indent="        ")
    lines += [
        "",
        "Returns:",
        *textwrap.wrap(call.holds, WIDTH - 8, initial_indent="    ", subsequent_indent="    "),
    ]
    lines += ["", "Raises:"]
    for kind in call.raises:
        lines += textwrap.wrap(
            f"{kind}: {_RAISES[kind]}", WIDTH - 8, initial_indent="    ", subsequent_indent="        "
        )
    lines += ["", "Examples:", *(f"    {line}" for line in call.example.splitlines()), '"""']
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- JSON Schemas
#
# A schema has each key and what it takes. It cannot check whether a model exists or which lists are paired. Keys of
# EasyTrain's files that brim reads are allowed, unchecked.

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_ANY: Schema = {}
_FOREIGN = "foreign"  # in the definitions


def schemas() -> dict[str, str]:
    """The text of each schema by its file's name."""
    files = {"train.schema.json": _train(), "sweep.schema.json": _sweep(), "forecast.schema.json": _forecast()}
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
    of_the_sweep: Schema = {
        "models_to_train": {"description": "Only these models.", "anyOf": [{"type": "string"}, names]},
        "max_experiments": {
            "description": "Only the first so many experiments.",
            "anyOf": [whole(1).schema, {"type": "null"}],
        },
        "results_file": {"description": "Where the table of results is also written.", "type": ["string", "null"]},
        "continue_on_error": _ANY,
        "parallel_jobs": _ANY,
        "save_results": _ANY,
    }
    search: Schema = {
        "grid": {"description": "Dotted keys with lists of values.", **lists},
        "groups": {
            "description": "Grids by name, each expanded separately, instead of `grid`.", "type": ["object", "null"],
            "additionalProperties": lists,
        },
        "fixed": {"description": "Settings of every experiment.", **one},
        "pairing": {
            "description": "How lists are combined; auto pairs models with batch sizes and crosses all else.",
            "enum": ["auto", "zip", "product"],
        },
        "zip": {"description": "Lists of keys that are paired one to one.", "type": "array", "items": names},
        "exclude": {"description": "Combinations that are dropped.", "type": "array", "items": lists},
        "include": {"description": "Experiments that are added.", "type": "array", "items": one},
        "repeat": {"description": "Each experiment so many times.", **whole(1).schema},
        "seeds": {
            "description": "Each experiment with each of these seeds.", "type": "array",
            "items": whole(0, MOST_SEED).schema,
        },
    }  # fmt: skip
    whole_file, loose = _settings(_single), _settings(_single_or_list)
    dotted = {key: schema for key, schema in loose["properties"].items() if "." in key}
    found = {**_object({**dotted, **search, **of_the_sweep}), "patternProperties": loose["patternProperties"]}
    whole_file["properties"] |= {
        **of_the_sweep, "grid_search": found, "grid": {"description": "Short for grid_search.grid.", **lists},
    }  # fmt: skip
    return {
        "$schema": _DRAFT,
        "title": "A file of brim sweep",
        "description": "docs/commands/sweep.md",
        **whole_file,
        "$defs": {
            **_definitions(),
            "settings": _settings(_single, null=True),
            "lists": _settings(_single_or_list, null=True),
        },
    }


def _forecast() -> Schema:
    settings = {name: _setting_schema(one) for one in forecast_file_settings() for name in _spellings(one.name)}
    workload = {"$ref": "#/$defs/workload"}
    defaults, workloads = (FILE_SECTIONS[name] for name in ("defaults", "workloads"))
    sections: Schema = {
        "defaults": {"description": defaults, "anyOf": [workload, {"type": "null"}]},
        "workloads": {
            "description": workloads, "type": "object", "minProperties": 1, "additionalProperties": workload,
        },
    }  # fmt: skip
    return {
        "$schema": _DRAFT,
        "title": "A file of brim forecast --file",
        "description": "docs/integrations/ci.md",
        **_object(sections),
        "required": ["workloads"],
        "$defs": {"workload": _object(settings)},
    }


def _spellings(name: str) -> tuple[str, ...]:
    """Both ways to write a key."""
    return tuple(dict.fromkeys((name, name.replace("_", "-"))))


def _setting_schema(one: Declared) -> Schema:
    """What a setting takes in a file: a list or names with values, where it may be given several times."""
    description = {"description": MODEL_HELP if one.name == "model" else one.setting.help}
    if one.switch:
        return {**description, "type": ["boolean", "null"]}
    if one.setting.many:
        return {**description, "type": ["string", "array", "object", "null"]}
    kinds = [name for kind, name in ((str, "string"), (int, "integer")) if kind in (one.type, *get_args(one.type))]
    schema = dict(one.setting.check.schema) or {"type": kinds or ["string"]}
    return {**description, "anyOf": [schema, {"type": "null"}]}


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


# ------------------------------------------------------------------------------------------ tables of docs

KEYS_BEGIN = "<!-- keys: written by python -m brim.settings.generated -->"
KEYS_END = "<!-- end of keys -->"
_INTRODUCTION = """# Settings

Written by `python -m brim.settings.generated` from the declarations in `src/brim/settings`; a test keeps it current.

Every setting has one name. On the command line it is a flag (`--batch-size 8`, or `--batch_size 8`), in Python a
parameter (`brim.find(…, batch_size=8)`), in a file that `--settings FILE` names a key:

```yaml
# brim eval --settings eval.yaml -b 16      (a flag comes before the file)
model: ./my-model
data: questions.jsonl
batch_size: 8           # or batch-size
metrics: [bleu, rouge]
knob: {max_crops: 4}
```

An error names what was written: `--batch-size 0: …`, `batch_size=0: …`, or `eval.yaml: batch_size (line 4): 0: …`.
"""


def settings_page() -> str:
    """The page with every command's settings."""
    return "\n".join([_INTRODUCTION, *(_command(command) for command in COMMANDS.values())])


def with_keys(page: str, table: list[str]) -> str:
    """A page with a table of a file's keys between its two marks."""
    before, mark, rest = page.partition(KEYS_BEGIN)
    _, end, after = rest.partition(KEYS_END)
    assert mark
    assert end
    lines = "\n".join(table)
    return f"{before}{KEYS_BEGIN}\n\n{lines}\n\n{KEYS_END}{after}"


def _training_keys() -> list[str]:
    rows = [
        f"| `{row.key}` | {row.takes} | {_value(row.default)} | {_cell(row.help)} |" for row in SETTING_KEYS.values()
    ]
    return ["| key | takes | default | meaning |", "|---|---|---|---|", *rows]


def _sweep_keys() -> list[str]:
    """What a sweep's file has beside the keys of a training file."""
    own, known = _sweep()["properties"], _train()["properties"]
    search = own["grid_search"]["properties"]
    keys = {key: schema for key, schema in own.items() if key not in known}
    keys |= {
        f"grid_search.{key}": schema for key, schema in search.items() if key not in {*own, *known} or key == "grid"
    }
    rows = [
        f"| `{key}` | {_words(schema)} | {_cell(schema['description'])} |"
        for key, schema in keys.items()
        if "description" in schema
    ]
    return ["| key | takes | meaning |", "|---|---|---|", *rows]


def _words(schema: Schema) -> str:
    """What a value may be: `whole number from 1`, `list of text`."""
    if "anyOf" in schema:
        return " or ".join(_words(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "$ref" in schema:
        return {"#/$defs/lists": "keys with lists", "#/$defs/settings": "keys with values"}[schema["$ref"]]
    kinds = [schema["type"]] if isinstance(schema["type"], str) else [one for one in schema["type"] if one != "null"]
    if kinds == ["array"]:
        return f"list of {_words(schema['items'])}"
    if kinds == ["object"]:
        return f"names, each with {_words(schema['additionalProperties'])}"
    return {"integer": f"whole number from {schema.get('minimum')}", "string": "text"}[kinds[0]]


def _command(command: Command) -> str:
    call = "" if command.python is None else f", `brim.{command.python.name}()`"
    rows = [_row(one) for one in declared(command.declaration()) if not one.setting.hidden]
    table = ["| flag | parameter | default | meaning |", "|---|---|---|---|", *rows] if rows else ["No settings."]
    return "\n".join([f"## `brim {command.name}`{call}", "", command.summary, "", *table, ""])


def _row(one: Declared) -> str:
    setting = one.setting
    flags = [*([setting.metavar.split()[0] if setting.metavar else one.name] if setting.argument else []), *one.flags]
    shown = "" if setting.only == "python" else " ".join(f"`{flag}`" for flag in flags)
    parameter = "" if setting.only == "flags" else f"`{one.name}`"
    default = "required" if one.required else _value(one.default)
    return f"| {shown} | {parameter} | {default} | {_cell(setting.help)} |"


def _value(default: Any) -> str:
    if default is None or default is False:
        return "" if default is None else "`false`"
    if default is True:
        return "`true`"
    return f"`{','.join(map(str, default)) if isinstance(default, tuple) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ----------------------------------------------------------------------------------------------- all files

_PACKAGE = Path(__file__).parents[1]


def generated_files(package: Path = _PACKAGE) -> dict[Path, str]:
    """What each file should hold; those of the docs where there is a clone around the package."""
    files = {package / "api.py": python_module()}
    files |= {package / "settings" / "schemas" / name: text for name, text in schemas().items()}
    docs = package.parents[1] / "docs"
    if docs.is_dir():
        files[docs / "settings.md"] = settings_page()
        training = docs / "training.md"
        files[training] = with_keys(training.read_text(encoding="utf-8"), _training_keys())
        formats = docs / "reference" / "files.md"
        files[formats] = with_keys(formats.read_text(encoding="utf-8"), _sweep_keys())
    return files


if __name__ == "__main__":
    for _path, _text in generated_files().items():
        _path.parent.mkdir(exist_ok=True)
        _path.write_text(_text, encoding="utf-8")
