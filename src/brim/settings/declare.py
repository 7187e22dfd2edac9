"""A setting, declared once: the annotation of a dataclass field.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ReportSettings:
        runs: Annotated[tuple[Path, ...], Setting(help="The folder of a run.", argument=True, many=True)]
        output: Annotated[Path | None, Setting(help="Where the page goes.", flags=("-o", "--output"))] = None

From it come the flag (`cli/adapter.py`), the parameter of the Python function (`generated.py`), the key of a
`--settings` file (`read_settings_file`) and the row of a table in the docs (`generated.py`). The settings of a field
that is itself a dataclass are settings of the whole. Does not know which settings there are, nor who asks.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from brim.errors import RequestError, nearest_names
from brim.settings.caller import flag_of, given, named
from brim.settings.problems import Problem, raise_errors
from brim.settings.setting_checks import Check, WrongEntryError, any_value, flag

if TYPE_CHECKING:
    from brim.settings.yaml_file import Document

__all__ = [
    "AS_FIELD", "Declared", "FromFile", "Key", "NestedSettings", "Setting", "SettingKey", "check_fields",
    "declared", "flag_names", "read_settings", "read_settings_file", "setting_keys", "settings_at",
]  # fmt: skip

_UNCHECKED = any_value()
AS_FIELD = object()  # a setting's default is that of its field
_Kind = TypeVar("_Kind")
_Field = tuple[dataclasses.Field[Any], Any, "Setting | None", "NestedSettings | None"]
_known_fields: dict[type[Any], tuple[_Field, ...]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a caller needs to know of one setting; the field has its type and default."""

    help: str
    name: str = ""  # as callers write it, with underscores; empty: the field's
    flags: tuple[str, ...] = ()  # every spelling on the command line; empty: `--name`
    panel: str = ""  # under which heading of the help it stands
    metavar: str = ""
    check: Check = _UNCHECKED  # reads text and Python's values; of a switch, true or false anyway
    many: bool = False  # may be given several times
    argument: bool = False  # a word without a flag; in Python a positional parameter
    inverted: bool = False  # the caller says no: the field is true where the flag is not given
    default: Any = AS_FIELD  # as callers see it, where that is not the field's own
    missing: str = ""  # what to do, where a setting without a default is not given
    python: str = ""  # the type of the parameter, where that is neither the check's nor the field's own
    python_default: Any = AS_FIELD  # of the parameter, where that is not as on the command line
    python_help: str = ""  # where that is not the flag's help with parameters for flags
    only: str = ""  # "flags" or "python": there is no such parameter, or no such flag
    positional: bool = False  # in Python a positional parameter, on the command line a flag
    hidden: bool = False  # not in the help
    offers: tuple[str, ...] = ()  # words that the shell completes, where the check has no list of them


@dataclasses.dataclass(frozen=True)
class Key:
    """The annotation of a field that is a key of a training file; with a `Setting` beside it, also a flag."""

    check: Check
    help: str
    each: bool = False  # the check is for every value under the key, whatever its name


@dataclasses.dataclass(frozen=True)
class SettingKey:
    """One key of a training file; one that ends in `*` stands for any name there."""

    key: str
    check: Check
    help: str
    default: Any = None

    @property
    def takes(self) -> str:
        """What the key takes, for tables and messages."""
        return self.check.takes


@dataclasses.dataclass(frozen=True)
class NestedSettings:
    """The annotation of a field that is a dataclass of settings: what is otherwise for this command."""

    without: tuple[str, ...] = ()  # settings that it lacks, by the names that callers write
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)  # and those it can do without, with a help


@dataclasses.dataclass(frozen=True)
class Declared:
    """A setting in its place."""

    setting: Setting
    name: str  # as callers write it
    type: Any
    default: Any  # as callers see it; MISSING: it must be given

    @property
    def required(self) -> bool:
        """Whether there is nothing to take where it is not given."""
        return self.default is dataclasses.MISSING

    @property
    def switch(self) -> bool:
        """Whether it is on or off, or left to brim."""
        return self.type is bool or self.type == (bool | None)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling on the command line; none for an argument that has no flag."""
        return self.setting.flags or (() if self.setting.argument else (flag_of(self.name),))

    def read(self, value: Any) -> Any:
        """The value as the field has it; a `RequestError` names the setting as its caller wrote it."""
        try:
            found = self.setting.check(value)
        except ValueError as error:
            wrong = error.entry if isinstance(error, WrongEntryError) else value
            raise RequestError(f"{given(self.name, wrong)}: {error}") from None
        return not found if self.setting.inverted else found


def declared(kind: type[Any]) -> tuple[Declared, ...]:
    """Every setting of a dataclass and of its parts, in order; arguments first."""
    found = {one.name: one for one in _declared(kind)}
    return tuple(sorted(found.values(), key=lambda one: not (one.setting.argument or one.setting.positional)))


def read_settings(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """An object of a declaration, from what was given by name; what was not has its default.

    A class may have a method `arranged`, which puts values in order before they are read.
    """
    known = {one.name: one for one in declared(kind)}
    for name in values:
        if name not in known:
            raise RequestError(f"{named(name)}: there is no such setting{nearest_names(name, known)}")
    checked = {name: known[name].read(value) for name, value in values.items()}
    return _built(kind, checked)


def check_fields(settings: Any) -> None:
    """What an object's fields hold, checked, however it was made; those with their default are right."""
    for field, _, setting, part in _fields(type(settings)):
        value = getattr(settings, field.name)
        if setting is None or part is not None or setting.inverted:
            continue
        if value is not None and value != field.default and value != setting.default:
            Declared(setting=setting, name=setting.name or field.name, type=None, default=None).read(value)


def _built(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    arrange = getattr(kind, "arranged", None)
    if arrange is not None:
        values = arrange(values)
    made: dict[str, Any] = {}
    for field, hint, setting, part in _fields(kind):
        if part is not None:
            made[field.name] = values[field.name] if field.name in values else _built(hint, _without(values, part))
        elif setting is not None:
            name = setting.name or field.name
            if name in values:
                made[field.name] = values[name]
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise RequestError(f"{named(name)} is missing{': ' if setting.missing else ''}{setting.missing}")
        elif field.name in values:  # which `arranged` has put there
            made[field.name] = values[field.name]
    return kind(**made)


def _without(values: Mapping[str, Any], part: NestedSettings) -> Mapping[str, Any]:
    return {name: value for name, value in values.items() if name not in part.without}


def _declared(kind: type[Any]) -> Iterator[Declared]:
    for field, hint, setting, part in _fields(kind):
        if part is not None:
            yield from (_optional(one, part) for one in _declared(hint) if one.name not in part.without)
        elif setting is not None:
            name = setting.name or field.name
            yield Declared(setting=setting, name=name, type=hint, default=_default(field, setting))


def _optional(one: Declared, part: NestedSettings) -> Declared:
    if one.name not in part.optional:
        return one
    setting = dataclasses.replace(one.setting, help=part.optional[one.name])
    return dataclasses.replace(one, setting=setting, default=None)


def setting_keys(kind: type[Any], prefix: str = "") -> Iterator[SettingKey]:
    """The keys of a section of a training file, with their defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        for note in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(note, Key):
                default = None if field.default is dataclasses.MISSING else field.default
                name = f"{prefix}{field.name}{'.*' if note.each else ''}"
                yield SettingKey(name, note.check, note.help, default)


def flag_names(kind: type[Any]) -> dict[str, str]:
    """The fields of a section that are settings of a command too, with the names that callers write."""
    return {field.name: setting.name or field.name for field, _, setting, _ in _fields(kind) if setting is not None}


def _default(field: dataclasses.Field[Any], setting: Setting) -> Any:
    if setting.default is not AS_FIELD:
        return setting.default
    if field.default_factory is not dataclasses.MISSING:
        return None  # an empty list or mapping: nothing is given
    if setting.inverted:
        return not field.default
    return None if field.default == () else field.default


def _fields(kind: type[Any]) -> tuple[_Field, ...]:
    """The fields with their plain types, and what they are annotated with; worked out once for each class."""
    if kind not in _known_fields:
        _known_fields[kind] = _read_fields(kind)
    return _known_fields[kind]


def _read_fields(kind: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        hint: Any = hints[field.name]
        notes: tuple[Any, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, notes = hint.__origin__, hint.__metadata__
        plain = _plain(hint)
        setting = next((note for note in notes if isinstance(note, Setting)), None)
        key = next((note for note in notes if isinstance(note, Key)), None)
        if setting is not None and key is not None:  # what the file says holds where the flag is not given
            setting = dataclasses.replace(setting, check=key.check, default=False if hint is bool else None)
        elif setting is not None and setting.check is _UNCHECKED and hint in (bool, bool | None):
            setting = dataclasses.replace(setting, check=flag())
        part = next((note for note in notes if isinstance(note, NestedSettings)), None)
        if part is None and setting is None and isinstance(plain, type) and dataclasses.is_dataclass(plain):
            part = NestedSettings()
        found.append((field, plain if part is not None else hint, setting, part))
    return tuple(found)


def _plain(hint: Any) -> Any:
    """A part that may be left out, without the None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [one for one in typing.get_args(hint) if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


# ------------------------------------------------------------------------------------------ --settings FILE
#
#     model: ./my-model
#     batch-size: 8           # or batch_size
#     metrics: [bleu, rouge]
#     knob: {max_crops: 4}

FromFile = tuple[dict[str, Any], dict[str, str]]  # values by name, as flags would give them; and where each stands


def read_settings_file(file: str, known: Sequence[Declared]) -> FromFile:
    """The file's settings by name; a `RequestError` names every key that the command lacks, with its line."""
    from brim.settings.yaml_file import read_yaml  # which is not needed to show flags

    values, lines, problems = settings_at(read_yaml(file), (), known)
    raise_errors(problems)
    return values, lines


def settings_at(
    document: Document, place: tuple[str, ...], known: Sequence[Declared]
) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """The settings under some keys of a file, as `FromFile` has them, and what is wrong with them."""
    settings = {one.name: one for one in known}
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    problems: list[Problem] = []
    section: Mapping[str, Any] = document.data
    for part in place:
        section = section[part]
    for key, value in section.items():
        name, on = _name(key, settings)
        line, full = document.line(*place, key), ".".join((*place, key))
        message = ""
        if name not in settings:
            message = f"there is no such setting{nearest_names(name, settings)}"
        elif name in values:
            message = f"{name} is given twice; keep one"
        elif value is not None:
            try:
                values[name] = _as_flag(settings[name], value, on=on)
            except ValueError as error:
                message = f"{value!r}: {error}"
            lines[name] = f"{Path(document.file).name}: {full} (line {line})"
        if message:
            problems.append(Problem(severity="error", file=document.file, line=line, key=full, message=message))
    return values, lines, problems


def _name(key: str, settings: Mapping[str, Declared]) -> tuple[str, bool]:
    """The setting that a key names; `no_chat` is `chat` turned off."""
    name = key.replace("-", "_")
    positive = name.removeprefix("no_")
    if name not in settings and positive in settings and settings[positive].switch:
        return positive, False
    return name, True


def _as_flag(one: Declared, value: Any, *, on: bool = True) -> Any:
    """A value of YAML as the flag would give it: text, a list of texts, or true and false."""
    if one.switch:
        if not isinstance(value, bool):
            raise ValueError("it must be true or false")
        return value is on
    if isinstance(value, Mapping):
        entries = [name if item is None else f"{name}={_text(item)}" for name, item in value.items()]
        if not one.setting.many:
            raise ValueError("it is one value, not a mapping")
        return entries
    if isinstance(value, list):
        return [_text(item) for item in value] if one.setting.many else _text(value)
    return [_text(value)] if one.setting.many else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError("it must be a text, a number or a list of them")
