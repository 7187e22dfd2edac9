"""Consoles for people: results on standard output, everything else on standard error."""

from __future__ import annotations

from rich.console import Console

__all__ = ["error_console", "output_console"]


def output_console() -> Console:
    """Where results go; colour and live drawing only on a terminal, `NO_COLOR` honoured by rich."""
    return Console(soft_wrap=True)


def error_console() -> Console:
    """Where progress, notes and errors go."""
    return Console(stderr=True, soft_wrap=True)
