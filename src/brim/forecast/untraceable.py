"""What is in the way of a trace: the error that says so, and the words of somebody else's."""

from __future__ import annotations

from brim.errors import BrimError, RequestError

__all__ = ["UntraceableError", "first_line", "obstacle_in_words"]


class UntraceableError(RequestError):
    """A step does something whose memory cannot be worked out without running it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; of one without a message, its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def obstacle_in_words(error: Exception) -> str:
    """The first line, with the kind of error before it where it is not one of brim's own."""
    return first_line(error) if isinstance(error, BrimError) else f"{type(error).__name__}: {first_line(error)}"
