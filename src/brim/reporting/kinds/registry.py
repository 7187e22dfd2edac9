"""Which file makes the page of which kind of run. A new kind adds one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from brim.reporting.base import Page
from brim.reporting.kinds.evaluation import evaluation_page
from brim.reporting.kinds.find import find_page
from brim.reporting.kinds.other import other_page
from brim.reporting.kinds.profile import profile_page
from brim.reporting.kinds.sweep import sweep_page
from brim.reporting.kinds.training import training_page
from brim.reporting.read import Run

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
