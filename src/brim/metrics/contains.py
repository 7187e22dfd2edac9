"""Contains: a reference stands somewhere in the answer, for models that answer in sentences."""

from __future__ import annotations

from brim.metrics.base import TextMetric
from brim.metrics.normalised_match import normalise_answer

__all__ = ["Contains"]


class Contains(TextMetric):
    """1 when the words of a reference appear in the answer, in a row; both normalised as SQuAD does.

    Whole words count: `no` is not contained in `I know`. Scripts without spaces need another metric.
    """

    name = "contains"

    def similarity(self, prediction: str, reference: str) -> float:
        answer, wanted = normalise_answer(prediction), normalise_answer(reference)
        if not wanted:  # nothing but articles and punctuation: only the same nothing, not every answer, matches
            return float(not answer)
        return float(f" {wanted} " in f" {answer} ")
