"""What an evaluation tells whoever watches it."""

from __future__ import annotations

from brim.evaluation.subject import SubjectFacts
from brim.running.figures import ExecutionFigures

__all__ = ["EvalListener"]


class EvalListener:
    """Told of the run as it goes; does nothing by itself."""

    def opened(self, facts: SubjectFacts) -> None:
        """Model and data are there."""

    def started(self, total: int, done: int) -> None:
        """So many samples are this process's to do, of which so many were done by an earlier run."""

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        """A batch was recorded."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""
