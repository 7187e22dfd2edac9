"""What is wrong with a file: one record for each problem, and the one way they are shown.

    config.yaml:7: error: hp.batch_size: 0: it must be auto or a whole number from 1

Does not know what is checked, nor who asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from brim.errors import RequestError

__all__ = ["Problem", "Severity", "has_errors", "in_order", "raise_errors", "render_problems", "strictly"]

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")
_MOST_SHOWN = 50  # in one error message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a file. An error stops the work, a warning does not, a note is for information."""

    severity: Severity
    message: str
    fix: str = ""  # what to write instead
    file: str = ""  # empty for values given in Python
    line: int | None = None  # from 1
    column: int | None = None  # from 1
    key: str = ""  # dotted

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file or 'line'}:{self.line}"
        parts = [place, self.severity, self.key, self.message]
        return ": ".join(part for part in parts if part) + (f"; {self.fix}" if self.fix else "")

    def to_json(self) -> dict[str, Any]:
        """The problem as plain JSON values."""
        return dataclasses.asdict(self)


def has_errors(problems: Iterable[Problem]) -> bool:
    """Whether any of them stops the work."""
    return any(problem.severity == "error" for problem in problems)


def strictly(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The same problems with every warning turned into an error; notes stay notes."""
    return tuple(
        dataclasses.replace(problem, severity="error") if problem.severity == "warning" else problem
        for problem in problems
    )


def render_problems(problems: Iterable[Problem]) -> str:
    """One line for each problem, by file and line; without a line last, the grave ones first."""
    return "\n".join(str(problem) for problem in in_order(problems))


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """By file and line; those without a line last."""
    return tuple(sorted(problems, key=_place))


def raise_errors(problems: Sequence[Problem]) -> None:
    """A `RequestError` with every error, and the warnings beside them, if there is an error at all."""
    if not has_errors(problems):
        return
    grave = [problem for problem in problems if problem.severity != "note"]
    errors = sum(problem.severity == "error" for problem in grave)
    if len(grave) == 1:
        raise RequestError(str(grave[0]))
    count = "1 error" if errors == 1 else f"{errors:,} errors"
    shown = sorted(grave, key=lambda problem: _ORDER.index(problem.severity))[:_MOST_SHOWN]
    more = f"\n… and {len(grave) - len(shown):,} more" if len(grave) > len(shown) else ""
    raise RequestError(f"{count} to correct\n{render_problems(shown)}{more}")


def _place(problem: Problem) -> tuple[bool, str, float, int]:
    line = float("inf") if problem.line is None else problem.line
    return (not problem.file, problem.file, line, _ORDER.index(problem.severity))
