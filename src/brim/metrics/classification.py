"""Metrics of classifiers and of multiple choice.

Top-k: a prediction is a sequence of class scores (floats; position = class), a mapping from label to score, or labels
in order, best first (text or whole numbers). A reference is a label or a class number; where scores are by position and
the reference is a name, `sample["classes"]` lists the names in order.

Multiple choice: a prediction is one log-likelihood per option. The reference is the option's position (from 0), its
text, or its letter (A is the first); the texts are in `sample["options"]`. Normalised by length, each log-likelihood is
divided by the option's length: `sample["option_lengths"]` (for instance in tokens) or else the UTF-8 bytes of its text,
so that long options are not at a disadvantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text

__all__ = ["ChoiceAccuracy", "ChoiceAccuracyNormalised", "TopK", "option_position", "ranked_labels"]


class TopK(Metric):
    """1 when one of the k best classes is a reference."""

    def __init__(self, k: int) -> None:
        if k < 1:
            raise RequestError(f"top-k accuracy: k is {k}; it must be at least 1")
        self.k = k
        self.name = f"top{k}"
        self.aliases = (f"top_{k}",)

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:
        best = ranked_labels(prediction, sample.get("classes"))[: self.k]
        wanted = {as_text(reference).strip() for reference in references}
        return float(any(not wanted.isdisjoint(names) for names in best))


TOP_1, TOP_5 = TopK(1), TopK(5)


def ranked_labels(prediction: Any, classes: Sequence[Any] | None = None) -> list[set[str]]:
    """The names of each class, best first; equal scores keep their order; none where a score is nan."""
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


class ChoiceAccuracy(Metric):
    """1 when the option with the highest log-likelihood is right; the first of equal ones; 0 where any is nan."""

    name = "choice_accuracy"
    aliases: tuple[str, ...] = ("choice",)

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:
        likelihoods = self._likelihoods(prediction, sample)
        options = sample.get("options")
        right = {option_position(reference, len(likelihoods), options) for reference in references}
        if any(math.isnan(value) for value in likelihoods):
            return 0.0
        return float(likelihoods.index(max(likelihoods)) in right)

    def _likelihoods(self, prediction: Any, sample: Mapping[str, Any]) -> list[float]:
        values = prediction.tolist() if hasattr(prediction, "tolist") else prediction
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise RequestError(
                f"metric {self.name}: the prediction is {type(prediction).__name__}, not one log-likelihood per "
                "option; for generated text use exact_match"
            )
        options = sample.get("options")
        if options is not None and len(options) != len(values):
            raise RequestError(f"metric {self.name}: {len(values)} log-likelihoods for {len(options)} options")
        return [float(value) for value in values]


class ChoiceAccuracyNormalised(ChoiceAccuracy):
    """As `choice_accuracy`, with each log-likelihood divided by its option's length."""

    name = "choice_accuracy_normalised"
    aliases = ("choice_accuracy_normalized", "choice_normalised", "choice_normalized")

    def _likelihoods(self, prediction: Any, sample: Mapping[str, Any]) -> list[float]:
        likelihoods = super()._likelihoods(prediction, sample)
        lengths = sample.get("option_lengths")
        if lengths is None:
            options = sample.get("options")
            if options is None:
                raise RequestError(f"metric {self.name}: the sample has neither options nor option_lengths")
            lengths = [len(as_text(option).encode()) for option in options]
        if len(lengths) != len(likelihoods):
            raise RequestError(f"metric {self.name}: {len(likelihoods)} log-likelihoods for {len(lengths)} lengths")
        return [value / max(length, 1) for value, length in zip(likelihoods, lengths, strict=True)]


def option_position(reference: Any, count: int, options: Sequence[Any] | None = None) -> int:
    """The position that a reference means: the option with this text, else this number, else this letter."""
    text = as_text(reference).strip()
    position = None
    texts = [as_text(option).strip() for option in options or ()]
    if not isinstance(reference, int) and text in texts:
        position = texts.index(text)
    elif text.isascii() and text.isdigit():
        position = int(text)
    elif len(text) == 1 and text.isascii() and text.isalpha():
        position = ord(text.upper()) - ord("A")
    if position is None or position >= count:
        of_options = f", one of the texts {texts}" if texts else ""
        raise RequestError(
            f"choice accuracy: the reference is {reference!r}; with {count} options it must be a position from 0 to "
            f"{count - 1}, a letter{of_options}"
        )
    return position
