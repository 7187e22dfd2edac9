"""CIDEr-D: how much a caption shares with what people agree on, rare words weighing more.

For n = 1 … 4 every caption is a vector of n-gram counts times idf = log(samples) − log(samples whose references have
the n-gram). The similarity to one reference is

    Σ min(given, wanted) · wanted / (|given| · |wanted|) · exp(−(difference in length)² / (2 · 6²))

averaged over n and over the references, times 10. Clipping and the length term are the D: repeating a good word
does not pay. Differs from the coco-caption code only in the words: lower-case runs of letters, digits and apostrophes
here, Stanford's PTB tokeniser (Java) there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text, reference_list, summary_of

__all__ = ["Cider", "cider_d", "words_of"]

_LONGEST = 4
_SIGMA = 6.0
_SCALE = 10.0
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")

_Gram = tuple[str, ...]
_Weight = Callable[[_Gram], float]


class Cider(Metric):
    """CIDEr-D of the run (0 to 10). idf needs the corpus, so a sample's own score is the same formula without idf.

    Over one sample nothing is rare and CIDEr-D is 0 by definition. A caption shorter than four words misses the
    longer n-grams and stays below the top, even against itself.
    """

    name = "cider"
    corpus_level = True

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        wanted = [_grams(as_text(reference)) for reference in references]
        return _consensus(_grams(as_text(prediction)), wanted, weight=lambda _: 1.0)

    def aggregate(
        self,
        scores: Sequence[float],  # noqa: ARG002  # they lack idf
        predictions: Sequence[Any],
        references: Sequence[Any],
    ) -> dict[str, float]:
        return summary_of(cider_d(predictions, references))


def cider_d(predictions: Sequence[Any], references: Sequence[Any]) -> list[float]:
    """CIDEr-D of every sample, 0 to 10, with idf over the references of all of them; 0 where there is no prediction."""
    if len(predictions) != len(references):
        raise RequestError(f"metric cider: {len(predictions)} predictions for {len(references)} lists of references")
    wanted = [[_grams(as_text(text)) for text in reference_list(each)] for each in references]
    samples_with = Counter(gram for captions in wanted for gram in set().union(*captions))
    log_samples = math.log(len(wanted)) if wanted else 0.0

    def idf(gram: _Gram) -> float:
        return log_samples - math.log(max(samples_with[gram], 1))

    return [
        _SCALE * _consensus(_grams(as_text(prediction)), captions, weight=idf)
        for prediction, captions in zip(predictions, wanted, strict=True)
    ]


def words_of(text: str) -> list[str]:
    """Lower-case words; punctuation is dropped."""
    return _WORD.findall(text.lower())


def _grams(text: str) -> Counter[_Gram]:
    words = words_of(text)
    return Counter(
        tuple(words[start : start + length])
        for length in range(1, _LONGEST + 1)
        for start in range(len(words) - length + 1)
    )


def _consensus(given: Counter[_Gram], captions: Sequence[Counter[_Gram]], *, weight: _Weight) -> float:
    """Mean similarity to the captions, in [0, 1]."""
    if not captions or not given:
        return 0.0
    return math.fsum(_similarity(given, wanted, weight) for wanted in captions) / len(captions)


def _similarity(given: Counter[_Gram], wanted: Counter[_Gram], weight: _Weight) -> float:
    shared, given_squares, wanted_squares = ([0.0] * _LONGEST for _ in range(3))
    for gram, count in given.items():
        value = count * weight(gram)
        aim = wanted[gram] * weight(gram)
        shared[len(gram) - 1] += min(value, aim) * aim
        given_squares[len(gram) - 1] += value**2
    for gram, count in wanted.items():
        wanted_squares[len(gram) - 1] += (count * weight(gram)) ** 2
    norms = [math.sqrt(left * right) for left, right in zip(given_squares, wanted_squares, strict=True)]
    cosines = [part / norm for part, norm in zip(shared, norms, strict=True) if norm > 0]
    difference = _bigrams(given) - _bigrams(wanted)
    return math.fsum(cosines) / _LONGEST * math.exp(-(difference**2) / (2 * _SIGMA**2))


def _bigrams(grams: Counter[_Gram]) -> int:
    """A caption's length, counted in bigrams as the reference code does: one less than its words."""
    return sum(count for gram, count in grams.items() if len(gram) == 2)
