"""Metrics of longer texts by the n-grams they share with the references: BLEU, ROUGE-L, CIDEr-D.

The only file that imports sacrebleu and rouge-score, each when its metric is used.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text, reference_list, summary_of
from brim.settings.caller import named

__all__ = ["Bleu", "Cider", "RougeL", "cider_d", "words_of"]


class Bleu(Metric):
    """Corpus BLEU-4 of the run, from 0 to 1, and sentence BLEU of each sample: 13a tokens, exponential smoothing.

    A failed sample is an empty translation in the corpus, which the brevity penalty punishes. A sentence of
    fewer than four words is scored over its own orders of n-grams; the corpus is not, so one-word answers have a
    corpus BLEU of 0.
    """

    name = "bleu"
    aliases = ("sacrebleu",)
    corpus_level = True

    def prepare(self) -> None:
        _bleu_scorer(effective_order=False)

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        wanted = [as_text(reference) for reference in references]
        return float(_bleu_scorer(effective_order=True).sentence_score(as_text(prediction), wanted).score) / 100

    def aggregate(
        self, scores: Sequence[float], predictions: Sequence[Any], references: Sequence[Any]
    ) -> dict[str, float]:
        hypotheses = [as_text(prediction) for prediction in predictions]
        wanted = [[as_text(text) for text in reference_list(each)] for each in references]
        most = max((len(texts) for texts in wanted), default=0)
        # sacrebleu takes the first reference of every sample, then the second, …; None where a sample has fewer
        streams = [[texts[place] if place < len(texts) else None for texts in wanted] for place in range(most)]
        spread = summary_of(scores)
        corpus = _bleu_scorer(effective_order=False).corpus_score(hypotheses, streams)
        return {**spread, "value": min(float(corpus.score) / 100, 1.0)}


def _bleu_scorer(*, effective_order: bool) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise RequestError(
            f"metric bleu needs the library sacrebleu ({error}): pip install sacrebleu, or leave bleu out of "
            f"{named('metrics')}"
        ) from error
    return BLEU(effective_order=effective_order, force=True)  # force: no warning about texts that look tokenised


class RougeL(Metric):
    """F measure of the longest common subsequence with the best reference, without stemming.

    The library reads a to z and 0 to 9 only: other scripts score 0.
    """

    name = "rouge_l"
    aliases = ("rouge", "rougel")

    def prepare(self) -> None:
        _rouge_scorer()

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        wanted = [as_text(reference) for reference in references]
        return float(_rouge_scorer().score_multi(wanted, as_text(prediction))["rougeL"].fmeasure)


@functools.cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError(
            f"metric rouge_l needs the library rouge-score ({error}): pip install rouge-score, "
            f"or leave rouge out of {named('metrics')}"
        ) from error
    return RougeScorer(["rougeL"], use_stemmer=False)


_LONGEST = 4
_SIGMA = 6.0
_SCALE = 10.0
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")

_Gram = tuple[str, ...]
_Weight = Callable[[_Gram], float]


class Cider(Metric):
    """CIDEr-D of the run (0 to 10): agreement of a caption with the references, where rare words weigh more.

    For n = 1 … 4 every caption is a vector of n-gram counts times idf = log(samples) − log(samples whose references
    have the n-gram). The similarity to one reference is

        Σ min(given, wanted) · wanted / (|given| · |wanted|) · exp(−(difference in length)² / (2 · 6²))

    averaged over n and over the references, times 10. Clipping and the length term are the D: repeating a word does
    not raise the score. The only difference from the coco-caption code is the tokeniser: lower-case runs of letters,
    digits and apostrophes here, Stanford's PTB tokeniser (Java) there.

    idf needs the corpus, so a sample's own score is the same formula without idf. With a single sample CIDEr-D is 0 by
    definition. A caption of fewer than four words scores below the maximum even against itself.
    """

    name = "cider"
    aliases = ("cider_d",)
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
