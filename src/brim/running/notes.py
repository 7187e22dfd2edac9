"""Where a note goes that no command prints: to the logger `brim`, or to the function that the caller gave."""

from __future__ import annotations

import logging

__all__ = ["log_note"]

_log = logging.getLogger("brim")


def log_note(line: str) -> None:
    """A warning of the logger `brim`; Python prints it to standard error unless the program has set up logging."""
    _log.warning(line)
