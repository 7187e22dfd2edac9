"""Where a command writes: results on standard output, everything else on standard error.

With `--json` standard output carries one document and nothing else, whatever the user's own code prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console

__all__ = ["error_console", "output_console", "print_document", "stdout_for_document"]

_STDOUT, _STDERR = 1, 2  # file descriptors
_documents: list[TextIO] = []  # where documents go, while standard output is kept for them


def output_console() -> Console:
    """Where results go; colour and live drawing only on a terminal, `NO_COLOR` honoured by rich."""
    return Console(soft_wrap=True)


def error_console() -> Console:
    """Where progress, notes and errors go."""
    return Console(stderr=True, soft_wrap=True)


def print_document(document: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """Print the one JSON document that `--json` asks for; a reader that has gone, as with `| head`, is no error."""
    text = json.dumps(document, indent=2, ensure_ascii=False, default=default)
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
