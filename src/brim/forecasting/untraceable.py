"""What is in the way of a trace: the error that says so, and the words of somebody else's."""

from __future__ import annotations

from brim.errors import BrimError, RequestError, first_line

__all__ = ["UntraceableError", "obstacle_in_words"]


class UntraceableError(RequestError):
    """A step does something whose memory cannot be worked out without running it."""


def obstacle_in_words(error: Exception) -> str:
    """The first line, with the kind of error before it where it is not one of brim's own."""
    return first_line(error) if isinstance(error, BrimError) else f"{type(error).__name__}: {first_line(error)}"
