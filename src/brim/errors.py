"""The errors brim raises, and the exit code each one ends a command with.

    BrimError
     ├── RequestError        the request is wrong: argument, value, what to do instead        exit 2
     ├── DoesNotFitError     not even the smallest size fits the memory limit                 exit 3
     └── LostError           the device, a child process or a rank was lost                   exit 4
          └── RankError      a rank failed; every rank raises the same message                exit 4

Anything else that escapes is a bug in brim or in the user's own step, and keeps its own type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BrimError",
    "DoesNotFitError",
    "LostError",
    "RankError",
    "RequestError",
    "first_line",
    "nearest_names",
    "plural",
]


class BrimError(Exception):
    """Base of every error brim raises on purpose: says what happened, with which values, and what to do."""

    exit_code = 1


class RequestError(BrimError):
    """The request cannot be carried out as written."""

    exit_code = 2


class DoesNotFitError(BrimError):
    """Nothing fits, even at the smallest size."""

    exit_code = 3


class LostError(BrimError):
    """The device, a child process or a rank is gone; what was finished is kept."""

    exit_code = 4


class RankError(LostError):
    """One rank failed, so all of them stop with the same message.

    `exit_code` is the code of the error that the failing rank had, so that a wrong request on
    one rank still reads as a wrong request everywhere.
    """

    def __init__(self, message: str, *, exit_code: int = LostError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def first_line(error: BaseException | str) -> str:
    """The first line of an error or of its text; of an error without a message, its kind."""
    text = str(error).strip() or ("" if isinstance(error, str) else type(error).__name__)
    return text.splitlines()[0] if text else ""


def plural(count: int, singular: str, many: str | None = None) -> str:
    """`1 sample`, `2,000 samples`."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def nearest_names(name: str, known: Iterable[str], *, count: int = 4) -> str:
    """The closest known names, ready to end a sentence: `; did you mean a, b?`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""
