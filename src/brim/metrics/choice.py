"""Multiple choice: the option that the model finds likeliest is the answer.

A prediction is one log-likelihood per option. The reference is the option's position (from 0), its text, or its letter
(A is the first); the texts are in `sample["options"]`. Length-normalised, each log-likelihood is divided by the
option's length: `sample["option_lengths"]` (tokens, say) or else the UTF-8 bytes of its text, so that
long options are not at a disadvantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text

__all__ = ["ChoiceAccuracy", "ChoiceAccuracyNormalised", "option_position"]


class ChoiceAccuracy(Metric):
    """1 when the likeliest option is right; of equal ones the first is taken, and nan anywhere is wrong."""

    name = "choice_accuracy"

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
