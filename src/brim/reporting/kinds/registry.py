"""Which file makes the page of which kind of run, alone and compared. A new kind adds one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.reporting.base import Page
from brim.reporting.kinds.evaluation import compare_evaluations, evaluation_page
from brim.reporting.kinds.profile import profile_page
from brim.reporting.kinds.profiles import compare_profiles
from brim.reporting.kinds.search import compare_others, other_page, search_page
from brim.reporting.kinds.sweep import sweep_page
from brim.reporting.kinds.training import training_page
from brim.reporting.kinds.trainings import compare_trainings
from brim.reporting.read import Run

__all__ = ["COMPARISONS", "PAGES", "comparison_of", "page_of"]

PAGES: Mapping[str, Callable[[Run], Page]] = {
    "eval": evaluation_page,
    "find": search_page,
    "profile": profile_page,
    "sweep": sweep_page,
    "train": training_page,
}
COMPARISONS: Mapping[str, Callable[[Sequence[Run]], tuple[dict[str, Any], Page]]] = {
    "eval": compare_evaluations,
    "profile": compare_profiles,
    "train": compare_trainings,
}


def page_of(run: Run) -> Page:
    """The page of a run; of a kind without one of its own, its summary as tables."""
    return PAGES.get(run.kind, other_page)(run)


def comparison_of(runs: Sequence[Run]) -> tuple[dict[str, Any], Page]:
    """The runs compared, as a document and as a page; of different kinds, or one twice, they are a `RequestError`."""
    folders = [run.folder.resolve() for run in runs]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise RequestError(f"{runs[place].folder}: it is given twice; give different runs to compare")
    for run in runs[1:]:
        if run.kind != runs[0].kind:
            raise RequestError(
                f"{runs[0].folder} is of the kind {runs[0].kind}, {run.folder} of the kind {run.kind}; "
                f"compare runs of one kind"
            )
    return COMPARISONS.get(runs[0].kind, compare_others)(runs)
