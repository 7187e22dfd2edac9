"""Top-k accuracy of a classifier: the right class is among its k best.

A prediction is a sequence of class scores (floats; position = class), a mapping from label to score, or labels in
order, best first (text or whole numbers). A reference is a label or a class number; where scores come by position and
the reference is a name, `sample["classes"]` lists the names in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text

__all__ = ["TopK", "ranked_labels"]


class TopK(Metric):
    """1 when one of the k best classes is a reference."""

    def __init__(self, k: int) -> None:
        if k < 1:
            raise RequestError(f"top-k accuracy: k is {k}; it must be at least 1")
        self.k = k
        self.name = f"top{k}"

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:
        best = ranked_labels(prediction, sample.get("classes"))[: self.k]
        wanted = {as_text(reference).strip() for reference in references}
        return float(any(not wanted.isdisjoint(names) for names in best))


def ranked_labels(prediction: Any, classes: Sequence[Any] | None = None) -> list[set[str]]:
    """What each class may be called, best class first; equal scores keep their order, and nan ranks nothing at all."""
    if isinstance(prediction, Mapping):
        labels = [{as_text(label).strip()} for label in prediction]
        return _by_score(labels, [float(score) for score in prediction.values()])
    if isinstance(prediction, str | int):
        return [{as_text(prediction).strip()}]
    values = list(prediction.tolist() if hasattr(prediction, "tolist") else prediction)
    if not any(isinstance(value, float) for value in values):
        return [{as_text(value).strip()} for value in values]
    names = [{str(place)} for place in range(len(values))]
    if classes is not None:
        if len(classes) != len(values):
            raise RequestError(f"top-k accuracy: {len(values)} class scores for {len(classes)} class names")
        names = [{str(place), as_text(name).strip()} for place, name in enumerate(classes)]
    return _by_score(names, [float(value) for value in values])


def _by_score(names: Sequence[set[str]], scores: Sequence[float]) -> list[set[str]]:
    if any(math.isnan(score) for score in scores):
        return []
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [names[place] for place in order]
