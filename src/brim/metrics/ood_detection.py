"""Out-of-distribution detection: AUROC, AUPR and FPR95 of two sets of scores.

A higher score means further out of distribution. Equal scores count as ties; their order does not matter.
Knows nothing of models and of how scores are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brim.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Scores = Sequence[float] | npt.NDArray[np.floating[Any]]

__all__ = ["DETECTION_METRICS", "aupr", "auroc", "detection_metrics", "fpr_at_recall"]

DETECTION_METRICS = ("auroc", "aupr", "fpr95")
RECALL = 0.95  # the part of the in-distribution set that FPR95 keeps


def detection_metrics(scores_in: Scores, scores_out: Scores) -> dict[str, float]:
    """The three figures by name: `auroc`, `aupr` (out is the positive class) and `fpr95`."""
    return {
        "auroc": auroc(scores_in, scores_out),
        "aupr": aupr(scores_in, scores_out),
        "fpr95": fpr_at_recall(scores_in, scores_out),
    }


def auroc(scores_in: Scores, scores_out: Scores) -> float:
    """The chance that an out sample scores above an in sample, a tie counting one half."""
    import numpy as np

    inner, outer = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    below = np.searchsorted(inner, outer, side="left")
    not_above = np.searchsorted(inner, outer, side="right")
    # Twice the wins, ties once: whole numbers, so that nothing is rounded before the one division.
    return int(below.sum() + not_above.sum()) / (2 * len(inner) * len(outer))


def aupr(scores_in: Scores, scores_out: Scores) -> float:
    """Average precision with out as the positive class: precision at each distinct score, weighted by recall gained.

    As scikit-learn's `average_precision_score`: no interpolation, samples of equal score enter together.
    """
    import numpy as np

    inner, outer = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    thresholds, gained = np.unique(outer, return_counts=True)
    true = len(outer) - np.searchsorted(outer, thresholds, side="left")  # out samples at or above each threshold
    false = len(inner) - np.searchsorted(inner, thresholds, side="left")
    return float(np.sum(gained / len(outer) * (true / (true + false))))


def fpr_at_recall(scores_in: Scores, scores_out: Scores, *, recall: float = RECALL) -> float:
    """The part of the out samples that passes as in, at the lowest threshold that keeps `recall` of the in samples.

    0.95 gives FPR95. A sample is kept when its score is at most the threshold.
    """
    import numpy as np

    if not 0 < recall <= 1:
        raise RequestError(f"recall {recall}: it must be above 0 and at most 1")
    inner, outer = _sorted(scores_in, "in"), _sorted(scores_out, "out")
    # The first place at which enough are kept; compared as the ratio itself, since 0.95 × n is rounded.
    kept = np.arange(1, len(inner) + 1) / len(inner)
    threshold = inner[int(np.searchsorted(kept, recall, side="left"))]
    return int(np.searchsorted(outer, threshold, side="right")) / len(outer)


def _sorted(scores: Scores, side: str) -> npt.NDArray[np.floating[Any]]:
    import numpy as np

    name = {"in": "in-distribution", "out": "out-of-distribution"}[side]
    values = np.asarray(scores)
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    if values.ndim != 1:
        raise RequestError(f"the {name} scores have the shape {values.shape}; give one number for each sample")
    if values.size == 0:
        raise RequestError(f"there are no {name} scores: detection needs samples of both kinds")
    if np.isnan(values).any():
        raise RequestError(f"{int(np.isnan(values).sum())} of the {name} scores are not numbers (nan)")
    return np.sort(values)
