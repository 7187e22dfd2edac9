"""ANLS: average normalised Levenshtein similarity, for answers read off documents."""

from __future__ import annotations

from brim.metrics.base import TextMetric

__all__ = ["Anls", "edit_distance"]


class Anls(TextMetric):
    """1 − edits / length of the longer text, and 0 below the threshold; case and runs of white space are ignored.

    Exactly at the threshold the similarity counts, as in the official script (the paper's formula leaves it out).
    """

    name = "anls"

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def similarity(self, prediction: str, reference: str) -> float:
        given, wanted = _plain(prediction), _plain(reference)
        longer = max(len(given), len(wanted))
        if longer == 0:
            return 1.0
        if 1 - abs(len(given) - len(wanted)) / longer < self.threshold:  # the lengths alone are too many edits
            return 0.0
        alike = 1 - edit_distance(given, wanted) / longer
        return alike if alike >= self.threshold else 0.0


def edit_distance(first: str, second: str) -> int:
    """Fewest insertions, deletions and substitutions of one character (Levenshtein)."""
    if len(first) < len(second):
        first, second = second, first
    above = list(range(len(second) + 1))
    for row, character in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            kept = above[column - 1] + (character != other)
            current.append(min(kept, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
