"""The `brim` command: where errors become exit codes and every command is registered.

Imports no torch: a command loads what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer

from brim import __version__
from brim.cli import cache, demo, encode, evaluate, find, forecast, knobs, profile, report, sweep, train, train_dpo
from brim.cli.console import error_console, print_traceback, stdout_for_document, visible_text
from brim.cli.pasted import SuggestingCommand, SuggestingGroup, rewritten
from brim.errors import BrimError, RankError, RequestError
from brim.storage.run_folder import keep_command_line

__all__ = ["app", "run"]

INTERRUPTED = 130  # what typer, too, leaves with after Ctrl-C


class _Commands(SuggestingGroup):
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
app.command("find", cls=SuggestingCommand)(find.find)
app.command("eval", cls=SuggestingCommand)(evaluate.evaluate)
app.command("profile", cls=SuggestingCommand)(profile.profile)
app.command("sweep", cls=SuggestingCommand)(sweep.sweep)
app.command("forecast", cls=SuggestingCommand)(forecast.forecast)
app.command("encode", cls=SuggestingCommand)(encode.encode)
app.command("knobs", cls=SuggestingCommand)(knobs.knobs)
app.command("report", cls=SuggestingCommand)(report.report)
app.command("demo", cls=SuggestingCommand)(demo.demo)
train.app.command("dpo", cls=SuggestingCommand)(train_dpo.dpo)
app.add_typer(train.app, name="train")
app.add_typer(cache.app, name="cache")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"brim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
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
        words = rewritten([word for word in given if word != "--debug"])
        keep_command_line(["brim", *words])
        with stdout_for_document() if _asks_for_document(words) else contextlib.nullcontext():
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if debug or error.filename is None:
            raise
        error_console().print(f"brim: {error.filename}: {error.strerror}", markup=False, highlight=False)
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
