"""Exact match: the same characters, white space around them aside."""

from __future__ import annotations

from brim.metrics.base import TextMetric

__all__ = ["ExactMatch"]


class ExactMatch(TextMetric):
    """1 when the answer is one of the references to the letter, case included."""

    name = "exact_match"

    def similarity(self, prediction: str, reference: str) -> float:
        return float(prediction.strip() == reference.strip())
