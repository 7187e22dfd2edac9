"""Where a command writes: results on standard output, everything else on standard error.

Much of what is printed comes from outside: names of columns and files, errors of samples and experiments. So neither
console obeys it. Control characters are shown as escapes (`\\x1b`), and there is no markup: brackets are brackets.
With `--json` standard output carries one document and nothing else, whatever the user's own code prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

__all__ = [
    "SOME_FAILED", "drop_output", "error_console", "output_console", "print_document", "print_traceback",
    "stdout_for_document", "visible_text",
]  # fmt: skip

SOME_FAILED = 1  # the exit code of what finished, with something on the way that failed
_STDOUT, _STDERR = 1, 2  # file descriptors
_documents: list[TextIO] = []  # where documents go, while standard output is kept for them

# What a terminal obeys or cannot show: control characters but newline and tab, marks that reorder the text around them,
# spaces without width, and surrogates, which stand for undecodable bytes of a file's name and cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]")


def visible_text(text: str) -> str:
    """The text with everything that a terminal would obey written as Python escapes it."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


class _SafeConsole(Console):
    """Shows text from outside, never obeys it. Styles, which rich adds to the text, work as ever."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Strings and cells, before they are measured and laid out."""
        return super().render_str(visible_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else: what others made a `Text` of."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_text(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """The reader has gone, as `| head` does: the command continues without it, and ends with its own exit code.

        rich would end the process with 1, which is what a check that failed ends with.
        """
        drop_output(self.file)


def drop_output(stream: IO[str]) -> None:
    """What is written from here on goes nowhere: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def output_console() -> Console:
    """Where results go; colour and live drawing only on a terminal, `NO_COLOR` honoured by rich."""
    return _SafeConsole(soft_wrap=True, markup=False, emoji=False)


def error_console() -> Console:
    """Where progress, notes and errors go."""
    return _SafeConsole(stderr=True, soft_wrap=True, markup=False, emoji=False)


def print_document(document: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """Print the one JSON document that `--json` asks for; a reader that has gone, as with `| head`, is no error.

    What a terminal would obey is written as JSON escapes it.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, default=default)
    text = _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    with contextlib.suppress(BrokenPipeError):
        print(text, file=_documents[-1] if _documents else sys.stdout, flush=True)


@contextlib.contextmanager
def stdout_for_document() -> Iterator[None]:
    """While inside, only `print_document` writes to standard output.

    All else that is printed, by Python, by C code or by child processes, goes to standard error.
    """
    with _real_stdout() as document, contextlib.redirect_stdout(sys.stderr):
        _documents.append(document)
        try:
            yield
        finally:
            _documents.pop()


@contextlib.contextmanager
def _real_stdout() -> Iterator[TextIO]:
    """Standard output as it is now; while inside, its file descriptor leads to standard error."""
    stdout = sys.stdout
    stdout.flush()
    try:
        kept = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # one of them is closed
        yield stdout
        return
    try:
        with _stream_to(kept, stdout) as document:
            yield document
    finally:
        stdout.flush()
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, _STDOUT)
        os.close(kept)


@contextlib.contextmanager
def _stream_to(kept: int, stdout: TextIO) -> Iterator[TextIO]:
    """A stream to where standard output led; `stdout` itself where somebody has put another file in its place."""
    try:
        replaced = stdout.fileno() != _STDOUT
    except OSError:  # it has no file descriptor
        replaced = True
    if replaced:
        yield stdout
        return
    document = open(kept, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False)  # noqa: SIM115
    try:
        yield document
    finally:
        with contextlib.suppress(BrokenPipeError):
            document.close()


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As Python's own `sys.excepthook`, with harmless text."""
    sys.stderr.write(visible_text("".join(traceback.format_exception(kind, error, trace))))
