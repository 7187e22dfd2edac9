"""The checklist on top of a run's page, the same for every kind of run."""

from __future__ import annotations

from brim.advice.check_lines import counts_text
from brim.advice.checks import check_run
from brim.advice.run_reader import Run
from brim.reporting.base import Section

__all__ = ["check_section"]

_WORDS = {"fail": "failed", "unknown": "could not be judged", "pass": "passed", None: "not judged"}


def check_section(run: Run) -> Section | None:
    """Every line with its verdict, failures first; None for a kind of run that is not checked."""
    lines = check_run(run)
    if not lines:
        return None
    ordered = sorted(lines, key=lambda line: [*_WORDS].index(line.verdict))
    return Section(
        title="Checks",
        paragraphs=(f"{counts_text(lines, reasons=False)}.",),
        points=tuple(f"{_WORDS[line.verdict]}: {line.title}: {line.text}" for line in ordered),
    )
