"""The `brim` command: where errors become exit codes and every command is found.

Imports no torch and no command: a command is built from its declaration when it runs, so `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer

from brim.cli.completion import answer_shells, with_shell
from brim.cli.console import drop_output, error_console, print_traceback, stdout_for_document, visible_text
from brim.cli.pasted import SuggestingGroup, rewritten
from brim.errors import BrimError, RankError, RequestError
from brim.settings.caller import called_by_flags
from brim.settings.commands import COMMANDS
from brim.storage.run_folder import keep_command_line

__all__ = ["app", "run"]

INTERRUPTED = 130  # what typer, too, leaves with after Ctrl-C
_SHOWN = (
    "find", "eval", "lm-eval", "profile", "sweep", "forecast", "ood", "encode", "knobs", "check", "advise", "report",
    "demo", "train", "watch", "doctor",
)  # fmt: skip
_FUNCTIONS = {
    "eval": "evaluate:evaluate", "lm-eval": "lm_eval:run", "cache list": "cache:list_plans",
    "cache clear": "cache:clear",
}  # fmt: skip


class LazyGroup(SuggestingGroup):
    """Commands that are known by their names and summaries, and built when one of them runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was named, with its flags."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, (self.built(name) if name is not None else command), rest

    def built(self, name: str) -> Any:
        """A command with its flags; a group is one already."""
        if not hasattr(self.commands[name], "commands") and not getattr(self.commands[name], "is_built", False):
            self.commands[name] = _build(f"{self.name} {name}" if self.name in _GROUPS else name)
            self.commands[name].is_built = True  # type: ignore[attr-defined]
        return self.commands[name]

    def build_all(self) -> None:
        """Build every command, also those of the groups: for those who ask which has a flag."""
        for name in list(self.commands):
            command = self.built(name)
            if hasattr(command, "build_all"):
                command.build_all()


def _build(name: str) -> Any:
    from brim.cli.adapter import build_command

    return build_command(COMMANDS[name], functools.partial(_run_command, name))


def _run_command(name: str, settings: Any) -> bool | None:
    """Import the command's file now, so that its help needs none of what it draws with; True: something failed."""
    module, _, function = _FUNCTIONS.get(name, f"{name}:{name}").partition(":")
    failed: bool | None = getattr(importlib.import_module(f"brim.cli.{module}"), function)(settings)
    return failed


class _Commands(LazyGroup):
    """The commands; typer, which prints what is wrong with a command line by itself, gets it with visible escapes."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse what stands before the command's name."""
        with _visible_messages():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Parse the command's own arguments and run it."""
        with _visible_messages():
            return super().invoke(ctx)


@contextlib.contextmanager
def _visible_messages() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message") and isinstance(message := getattr(error, "message", None), str):
            error.message = visible_text(message)  # type: ignore[attr-defined]  # typer has no public name for its kind
        raise


app = typer.Typer(
    name="brim",
    cls=_Commands,
    help="Fill the GPU to the brim, never spill: find the fastest batch size that fits.",
    epilog="Example: brim find swin3d_t --mode train --knob frames=16 --knob size=224 --dtype bfloat16",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS = {"cache": "Plans kept on disk, so that the same search is not made twice."}


def _stand_in() -> None:
    """What is registered for a command until it is built."""


for _name in _SHOWN:
    if _name in COMMANDS:
        app.command(_name, help=COMMANDS[_name].summary)(_stand_in)
for _group, _help in _GROUPS.items():
    _inner = typer.Typer(help=_help, epilog=f"Example: brim {_group} list", no_args_is_help=True, cls=LazyGroup)
    for _name, _command in COMMANDS.items():
        if _name.startswith(f"{_group} "):
            _inner.command(_name.removeprefix(f"{_group} "), help=_command.summary)(_stand_in)
    app.add_typer(_inner, name=_group)


def _show_version(asked: bool) -> None:
    if asked:
        from brim.diagnosis.examine import version_line

        typer.echo(visible_text(version_line()))
        raise typer.Exit


def _show_completion(shell: str | None) -> None:
    if shell is not None:
        from brim.cli.completion import completion_script

        typer.echo(completion_script(shell))
        raise typer.Exit


def _install_completion(shell: str | None) -> None:
    if shell is not None:
        from brim.cli.completion import install_completion

        typer.echo(install_completion(shell))
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True,
        help="Print the versions of brim, torch and CUDA, and the GPU.",
    ),
    show_completion: str = typer.Option(
        None, "--show-completion", callback=_show_completion, is_eager=True, metavar="[SHELL]",
        help="Print the completion script of bash, zsh, fish or powershell (by default of this shell).",
    ),
    install_completion: str = typer.Option(
        None, "--install-completion", callback=_install_completion, is_eager=True, metavar="[SHELL]",
        help="Install it for the user.",
    ),
) -> None:  # fmt: skip
    pass


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with the exit codes of docs/interface.md."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer or a file's name may hold what UTF-8 cannot show
            stream.reconfigure(errors="backslashreplace")
    code: int | str | None
    try:
        words = with_shell(rewritten([word for word in given if word != "--debug"]))
        keep_command_line(["brim", *words])
        answer_shells()
        with (
            called_by_flags(),
            stdout_for_document() if _asks_for_document(words) else contextlib.nullcontext(),
        ):
            code = app(args=words, prog_name="brim", standalone_mode=True)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrimError as error:
        if debug:
            raise
        if isinstance(error, RankError) and not isinstance(error.__cause__, Exception) and _quiet_rank():
            sys.exit(error.exit_code)  # every rank has this message: one prints it
        error_console().print(f"brim: {error}", markup=False, highlight=False)
        code = error.exit_code
    except BrokenPipeError:  # the reader of a pipe has gone, as `| head` does
        drop_output(sys.stdout)
        code = 0
    except OSError as error:
        if debug or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        what = error.filename or "cannot write"  # a stream has no name
        error_console().print(f"brim: {what}: {error.strerror}", markup=False, highlight=False)
        code = RequestError.exit_code
    except Exception as error:
        from brim.memory.weights import load_failure

        full = None if debug else load_failure(error, None, what="outside of any batch")
        if full is None:
            raise
        error_console().print(f"brim: {full}", markup=False, highlight=False)
        code = full.exit_code
    finally:
        keep_command_line([])
        sys.excepthook = print_traceback  # in place of typer's, for what leaves this function: with --debug, or a bug
    if code == INTERRUPTED:
        error_console().print("brim: interrupted")
    sys.exit(code)


def _asks_for_document(arguments: Sequence[str]) -> bool:
    return "--json" in itertools.takewhile(lambda argument: argument != "--", arguments)


def _quiet_rank() -> bool:
    return os.environ.get("RANK", "0") != "0"
