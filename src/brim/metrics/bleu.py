"""BLEU by sacrebleu, the only file that imports it: 13a tokenisation, exponential smoothing, case kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text, reference_list, summary_of
from brim.settings.caller import named

__all__ = ["Bleu"]


class Bleu(Metric):
    """Corpus BLEU-4 of the run, on the scale 0 to 1; each sample has its sentence BLEU beside it.

    A failed sample is an empty translation in the corpus: the brevity penalty pays for it. A sentence shorter than
    four words is scored over the orders that it has; the corpus is not, so one-word answers make a corpus BLEU of 0.
    """

    name = "bleu"
    corpus_level = True

    def prepare(self) -> None:
        _scorer(effective_order=False)

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        wanted = [as_text(reference) for reference in references]
        return float(_scorer(effective_order=True).sentence_score(as_text(prediction), wanted).score) / 100

    def aggregate(
        self, scores: Sequence[float], predictions: Sequence[Any], references: Sequence[Any]
    ) -> dict[str, float]:
        hypotheses = [as_text(prediction) for prediction in predictions]
        wanted = [[as_text(text) for text in reference_list(each)] for each in references]
        most = max((len(texts) for texts in wanted), default=0)
        # sacrebleu wants the first reference of every sample, then the second of every sample, …; None where none is
        streams = [[texts[place] if place < len(texts) else None for texts in wanted] for place in range(most)]
        spread = summary_of(scores)
        corpus = _scorer(effective_order=False).corpus_score(hypotheses, streams)
        return {**spread, "value": min(float(corpus.score) / 100, 1.0)}


def _scorer(*, effective_order: bool) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise RequestError(
            f"metric bleu needs the library sacrebleu ({error}): pip install sacrebleu, or leave bleu out of "
            f"{named('metrics')}"
        ) from error
    return BLEU(effective_order=effective_order, force=True)  # force: no warning about texts that look tokenised
