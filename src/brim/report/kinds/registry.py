"""Which file makes the page of which kind of run. A new kind adds one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from brim.report.base import Page
from brim.report.kinds.evaluation import evaluation_page
from brim.report.kinds.find import find_page
from brim.report.kinds.other import other_page
from brim.report.kinds.profile import profile_page
from brim.report.kinds.sweep import sweep_page
from brim.report.kinds.training import training_page
from brim.report.read import Run

__all__ = ["PAGES", "page_of"]

PAGES: Mapping[str, Callable[[Run], Page]] = {
    "eval": evaluation_page,
    "find": find_page,
    "profile": profile_page,
    "sweep": sweep_page,
    "train": training_page,
}


def page_of(run: Run) -> Page:
    """The page of a run; of a kind without one of its own, its summary as tables."""
    return PAGES.get(run.kind, other_page)(run)
