"""What a logger is: it opens runs, and a run takes figures at steps and a summary at its end.

Does not know what is evaluated or trained. How failures are handled, and in which thread a logger is called, is the
matter of `loggers.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

__all__ = ["EndedRun", "Logger", "Parameter", "RunLog"]

Parameter = int | float | str | bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndedRun:
    """The result of a run, as plain values."""

    figures: Mapping[str, float]
    state: str = "completed"  # or failed, interrupted
    failure: str = ""  # its kind, in a word
    error: str = ""

    @property
    def completed(self) -> bool:
        """Whether it did all its work."""
        return self.state == "completed"


class RunLog(abc.ABC):
    """One run, as one library keeps it."""

    @abc.abstractmethod
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Figures at a step; steps rise."""

    @abc.abstractmethod
    def end(self, ended: EndedRun) -> None:
        """The last call: the summary, and whether the run failed."""


class Logger(abc.ABC):
    """One library. Making it imports the library, and nothing else does; an `ImportError` says that it is missing."""

    extra: ClassVar[str]  # of brim, which installs the library

    @abc.abstractmethod
    def __init__(self, folder: Path) -> None:
        """For the runs of this folder, where the library's files go; nothing is written yet."""

    @abc.abstractmethod
    def open_run(self, name: str, parameters: Mapping[str, Parameter]) -> RunLog:
        """A run begins; the parameters have dotted keys."""
