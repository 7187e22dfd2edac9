"""A declaration as a command of typer: its flags, its help, its values from the command line and from a file.

The only file that says anything to typer about a setting. Every value reaches the declaration as text, as a list of
texts or as true and false, so that one check reads it wherever it was written.
"""

from __future__ import annotations

import importlib.resources
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from brim.cli.completion import values_of
from brim.cli.console import SOME_FAILED
from brim.cli.pasted import SuggestingCommand
from brim.errors import RequestError
from brim.settings.caller import called_by_flags
from brim.settings.commands import Command
from brim.settings.declare import Declared, declared, read_settings

__all__ = ["build_command"]

_PANELS = (  # in the order of the help
    "", "Points", "Data", "Loss", "Training", "Answers", "Batch size", "Seeds", "Device and precision", "Loading",
    "Recommendation", "Experiments", "Running", "Where", "Before a run", "Trying", "Rounds", "Checking", "Output",
)  # fmt: skip
_FLAG = "_flag"  # after the name of an argument that can be given with a flag as well
_LINES = "brim.settings.lines"  # in a context: where the settings of a file stand


def build_command(command: Command, run: Callable[[Any], bool | None]) -> Any:
    """The command, which calls `run` with the object of its declaration; where that returns True, something failed."""
    kind = command.declaration()
    settings = [one for one in declared(kind) if one.setting.only != "python"]
    settings.sort(key=lambda one: _PANELS.index(one.setting.panel))

    def call(context: typer.Context, **values: Any) -> None:
        lines = context.meta.get(_LINES, {})
        given = {name: value for name, value in values.items() if _is_given(context, name)}
        for name in [name for name in given if f"{name}{_FLAG}" in given and _from_file(context, name)]:
            del given[f"{name}{_FLAG}"]  # the word on the command line comes before the file
        with called_by_flags({name: line for name, line in lines.items() if _from_file(context, name)}):
            if run(read_settings(kind, _merged(given, settings))):
                raise typer.Exit(SOME_FAILED)

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter for one in settings for parameter in _parameters(one)),
        _file_parameter(settings),
        *([_schema_parameter(command.schema)] if command.schema else []),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(
        command.name.rpartition(" ")[2], cls=SuggestingCommand, help=f"{command.summary}\n\n{command.more}".strip(),
        epilog=f"Example: {command.example}", short_help=command.summary, no_args_is_help=command.alone_is_help,
    )(call)  # fmt: skip
    return typer.main.get_command(app)


def _parameters(one: Declared) -> Iterator[inspect.Parameter]:
    """What typer is to read for a setting: an option, an argument, or either."""
    setting = one.setting
    if setting.argument:
        text = "The model, where -m is not given." if setting.flags else setting.help
        needed = one.required and not setting.flags
        info = typer.Argument(metavar=setting.metavar or None, help=text, show_default=False)
        yield _parameter(one.name, list[str] if setting.many else str, info, needed=needed)
        if not setting.flags:
            return
    kind: Any = bool if one.switch else list[str] if setting.many else str
    shown = not (one.switch and one.default in (False, None)) and one.default is not None
    info = typer.Option(
        *one.flags, help=setting.help, rich_help_panel=setting.panel or None, metavar=_metavar(one),
        hidden=setting.hidden, show_default=shown, autocompletion=_completion(one),
    )  # fmt: skip
    default = one.default if one.switch or one.default is None or one.required else _shown(one.default)
    needed = one.required and not setting.missing
    name = f"{one.name}{_FLAG}" if setting.argument else one.name
    yield _parameter(name, kind, info, needed=needed, default=None if one.required else default)


def _parameter(name: str, kind: Any, info: Any, *, needed: bool, default: Any = None) -> inspect.Parameter:
    optional = kind if needed or default is not None else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[optional, info],
        default=inspect.Parameter.empty if needed else default,
    )  # fmt: skip


def _completion(one: Declared) -> Callable[[str], list[str]] | None:
    """What the shell offers as a value; None, where that is any text: the shell then offers files."""
    words = one.setting.offers or ([] if one.switch else values_of(one.setting.check.schema))

    def beginning(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return beginning if words else None


def _metavar(one: Declared) -> str | None:
    """As `N [x>=1]`, where a whole number has a least."""
    least = one.setting.check.schema.get("minimum")
    bound = f" [x>={least}]" if least is not None and not one.switch else ""
    return f"{one.setting.metavar}{bound}" or None


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _file_parameter(settings: list[Declared]) -> inspect.Parameter:
    """`--settings FILE`, read before all others: what the command line does not give comes from there."""

    def read(context: typer.Context, file: str | None) -> str | None:
        if file is not None:
            from brim.settings.declare import read_settings_file

            values, lines = read_settings_file(file, settings)
            context.default_map = {**(context.default_map or {}), **_by_parameter(values, context)}
            context.meta[_LINES] = lines
        return file

    info = typer.Option(
        "--settings", help="A YAML file with these settings, named like the flags; a flag overrides the file.",
        metavar="FILE", is_eager=True, callback=read, rich_help_panel="Output",
    )  # fmt: skip
    return _parameter("settings_file", str, info, needed=False)


def _schema_parameter(name: str) -> inspect.Parameter:
    """`--schema`: the JSON Schema of the file that the command takes, and nothing else."""

    def show(asked: bool) -> None:
        if asked:
            typer.echo(
                importlib.resources.files("brim.settings").joinpath("schemas", name).read_text("utf-8"), nl=False
            )
            raise typer.Exit

    info = typer.Option(
        "--schema", help="Print the JSON Schema of the file, for editors, and stop.", is_eager=True, callback=show,
        rich_help_panel="Output", show_default=False,
    )  # fmt: skip
    return inspect.Parameter("schema", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, info], default=False)


def _by_parameter(values: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The values by the names of typer's parameters: one that has a flag and an argument is given as the flag."""
    names = {param.name for param in context.command.params}
    return {f"{name}{_FLAG}" if f"{name}{_FLAG}" in names else name: value for name, value in values.items()}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return name not in ("settings_file", "schema") and source is not None and source.name not in ("DEFAULT",)


def _from_file(context: typer.Context, name: str) -> bool:
    sources = [context.get_parameter_source(one) for one in (name, f"{name}{_FLAG}")]
    return any(source is not None and source.name == "DEFAULT_MAP" for source in sources)


def _merged(values: Mapping[str, Any], settings: list[Declared]) -> dict[str, Any]:
    """By the names of the settings: of an argument that is given as a flag too, one."""
    found = {name: value for name, value in values.items() if value is not None and value != []}
    for one in settings:
        if one.setting.argument and one.setting.flags:
            flag = found.pop(f"{one.name}{_FLAG}", None)
            if flag is not None and one.name in found:
                raise RequestError(
                    f"{one.setting.flags[0]} {flag} and {found[one.name]} both name a {one.name}; keep one"
                )
            if flag is not None:
                found[one.name] = flag
    return found
