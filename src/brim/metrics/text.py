"""Metrics of short answers as text: exact, normalised and contained matches, shared words, edit distance."""

from __future__ import annotations

import re
import string
from collections import Counter

from brim.metrics.base import TextMetric

__all__ = ["Anls", "Contains", "ExactMatch", "NormalisedMatch", "TokenF1", "edit_distance", "normalise_answer"]


class ExactMatch(TextMetric):
    """1 when the answer equals a reference, case included and white space at the ends aside."""

    name = "exact_match"
    aliases = ("em", "acc", "accuracy")

    def similarity(self, prediction: str, reference: str) -> float:
        return float(prediction.strip() == reference.strip())


_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalise_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles (a, an, the), single spaces."""
    bare = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


class NormalisedMatch(TextMetric):
    """1 when the answer equals a reference once both are normalised."""

    name = "normalised_match"
    aliases = ("normalized_match",)

    def similarity(self, prediction: str, reference: str) -> float:
        return float(normalise_answer(prediction) == normalise_answer(reference))


class Contains(TextMetric):
    """1 when the words of a reference appear in the answer, in a row; for models that answer in sentences.

    Both are normalised as SQuAD does. Whole words count: `no` is not contained in `I know`. Scripts without spaces
    need another metric.
    """

    name = "contains"

    def similarity(self, prediction: str, reference: str) -> float:
        answer, wanted = normalise_answer(prediction), normalise_answer(reference)
        if not wanted:  # only articles and punctuation: every answer would contain it
            return float(not answer)
        return float(f" {wanted} " in f" {answer} ")


class TokenF1(TextMetric):
    """SQuAD's F1, the harmonic mean of precision and recall over the words shared with the best reference."""

    name = "token_f1"
    aliases = ("f1",)

    def similarity(self, prediction: str, reference: str) -> float:
        answer, wanted = normalise_answer(prediction).split(), normalise_answer(reference).split()
        if not answer or not wanted:
            return float(answer == wanted)
        shared = sum((Counter(answer) & Counter(wanted)).values())
        return 2 * shared / (len(answer) + len(wanted))


class Anls(TextMetric):
    """Average normalised Levenshtein similarity, for answers from documents: 1 − edits / length of the longer text.

    0 below the threshold; case and runs of white space are ignored. A similarity equal to the threshold counts, as in
    the official script (by the paper's formula it does not).
    """

    name = "anls"

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold

    def similarity(self, prediction: str, reference: str) -> float:
        given, wanted = _one_case(prediction), _one_case(reference)
        longer = max(len(given), len(wanted))
        if longer == 0:
            return 1.0
        if 1 - abs(len(given) - len(wanted)) / longer < self.threshold:  # the lengths alone are too many edits
            return 0.0
        similarity = 1 - edit_distance(given, wanted) / longer
        return similarity if similarity >= self.threshold else 0.0


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


def _one_case(text: str) -> str:
    return " ".join(text.lower().split())
