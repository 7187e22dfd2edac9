"""Which file compares which kind of run. A new kind adds one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brim.errors import RequestError
from brim.reporting.comparisons.base import Comparison
from brim.reporting.comparisons.evaluations import compare_evaluations, evaluations_page
from brim.reporting.comparisons.others import compare_others, others_page
from brim.reporting.comparisons.profiles import compare_profiles, profiles_page
from brim.reporting.comparisons.training import compare_trainings, trainings_page
from brim.reporting.read import Run

__all__ = ["COMPARISONS", "comparison_of"]

COMPARISONS: Mapping[str, Comparison] = {
    "eval": Comparison(compare_evaluations, evaluations_page),
    "profile": Comparison(compare_profiles, profiles_page),
    "train": Comparison(compare_trainings, trainings_page),
}


def comparison_of(runs: Sequence[Run]) -> Comparison:
    """How these runs are compared; runs of different kinds, or one run twice, are a `RequestError`."""
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
    return COMPARISONS.get(runs[0].kind, Comparison(compare_others, others_page))
