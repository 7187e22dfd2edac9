"""Normalised match: equal after SQuAD's normalisation, which `token_f1` and `contains` share."""

from __future__ import annotations

import re
import string

from brim.metrics.base import TextMetric

__all__ = ["NormalisedMatch", "normalise_answer"]

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; single spaces between words."""
    bare = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


class NormalisedMatch(TextMetric):
    """1 when the answer equals a reference once both are normalised."""

    name = "normalised_match"

    def similarity(self, prediction: str, reference: str) -> float:
        return float(normalise_answer(prediction) == normalise_answer(reference))
