"""Token F1: SQuAD's harmonic mean of precision and recall over the words in common."""

from __future__ import annotations

from collections import Counter

from brim.metrics.base import TextMetric
from brim.metrics.normalised_match import normalise_answer

__all__ = ["TokenF1"]


class TokenF1(TextMetric):
    """Words shared with the best reference, each as often as both have it."""

    name = "token_f1"

    def similarity(self, prediction: str, reference: str) -> float:
        answer, wanted = normalise_answer(prediction).split(), normalise_answer(reference).split()
        if not answer or not wanted:
            return float(answer == wanted)
        shared = sum((Counter(answer) & Counter(wanted)).values())
        return 2 * shared / (len(answer) + len(wanted))
