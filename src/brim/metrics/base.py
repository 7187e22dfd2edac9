"""What every metric is: a score in [0, 1] for each sample, and a figure for the whole run.

    class StartsAlike(TextMetric):
        name = "starts_alike"

        def similarity(self, prediction: str, reference: str) -> float:
            return float(prediction[:1] == reference[:1])

A sample without an answer (its step failed, or the answer is empty) scores 0 and stays in the mean: dropping it would
raise the score. Metrics know neither models nor files, and keep nothing between two calls.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from brim.errors import RequestError

__all__ = ["Metric", "TextMetric", "as_text", "is_blank", "mean_and_spread", "reference_list", "summary_of"]

_Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution
_ROUNDING = 1e-9  # how far past 0 or 1 a sum of floats may end up


class Metric(abc.ABC):
    """One way to score answers. Write `compare`; `score` and `aggregate` follow from it."""

    name: str
    aliases: tuple[str, ...] = ()  # other names of a built-in metric
    corpus_level: ClassVar[bool] = False  # True: the run's figure is not the mean of the samples' scores

    @abc.abstractmethod
    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:
        """The score of a prediction that is not empty, against at least one reference."""

    def score(self, prediction: Any, references: Any, sample: Mapping[str, Any] | None = None) -> float:
        """The sample's score in [0, 1]; 0 for a prediction that is None or empty."""
        sample = {} if sample is None else sample
        wanted = reference_list(references)
        if not wanted:
            raise RequestError(f"metric {self.name}: sample {_identity(sample)} has no reference to compare with")
        if is_blank(prediction):
            return 0.0
        result = float(self.compare(prediction, wanted, sample))
        if not -_ROUNDING <= result <= 1 + _ROUNDING:  # also false for nan
            raise RequestError(
                f"metric {self.name}: scored {result} for sample {_identity(sample)}; a score lies between 0 and 1"
            )
        return min(max(result, 0.0), 1.0)

    def aggregate(
        self,
        scores: Sequence[float],
        predictions: Sequence[Any],  # noqa: ARG002  # for metrics over the whole corpus
        references: Sequence[Any],  # noqa: ARG002
    ) -> dict[str, float]:
        """The run's figure as `value`, with `mean`, `std`, `count` and `ci95` of the samples' scores beside it."""
        return summary_of(scores)

    def prepare(self) -> None:  # noqa: B027  # most metrics need nothing
        """Raise a `RequestError` if a library that the metric needs is missing; called before the run starts."""


class TextMetric(Metric):
    """A metric of one text against another; of several references the best one counts."""

    @abc.abstractmethod
    def similarity(self, prediction: str, reference: str) -> float:
        """How similar the two are, in [0, 1]."""

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        text = as_text(prediction)
        return max(self.similarity(text, as_text(reference)) for reference in references)


def mean_and_spread(scores: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (n − 1), count, and the half width of the normal 95 % interval of the mean.

    One score has no spread: its `std` and `ci95` are 0, with a `count` of 1.
    """
    count = len(scores)
    if count == 0:
        raise RequestError("there are no scores to average: the evaluation had no samples")
    mean = math.fsum(scores) / count
    squares = math.fsum((score - mean) ** 2 for score in scores)
    std = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    return {"mean": mean, "std": std, "count": count, "ci95": _Z_95 * std / math.sqrt(count)}


def summary_of(scores: Sequence[float], *, value: float | None = None) -> dict[str, float]:
    """`mean_and_spread` with the run's figure in front: `value`, or else the mean."""
    spread = mean_and_spread(scores)
    return {"value": spread["mean"] if value is None else value, **spread}


def is_blank(prediction: Any) -> bool:
    """Whether there is no answer: None, only white space, or an empty list of scores or labels."""
    if prediction is None:
        return True
    if isinstance(prediction, str):
        return not prediction.strip()
    return hasattr(prediction, "__len__") and len(prediction) == 0


def reference_list(references: Any) -> list[Any]:
    """The references as a list: a single one need not be in a list, and None is no reference."""
    if references is None:
        return []
    if isinstance(references, str) or not isinstance(references, Sequence):
        return [references]
    return [reference for reference in references if reference is not None]


def as_text(value: Any) -> str:
    """Text unchanged, anything else (a number read from JSON) as `str`; None is the empty text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else str(value)


def _identity(sample: Mapping[str, Any]) -> str:
    return repr(sample["id"]) if "id" in sample else "(without id)"
