"""ROUGE-L by rouge-score, the only file that imports it: F measure of the longest common subsequence, no stemming."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import RequestError
from brim.metrics.base import Metric, as_text
from brim.settings.caller import named

__all__ = ["RougeL"]


class RougeL(Metric):
    """The F measure against the best reference. The library reads a to z and 0 to 9 only: other scripts score 0."""

    name = "rouge_l"

    def prepare(self) -> None:
        _scorer()

    def compare(self, prediction: Any, references: Sequence[Any], sample: Mapping[str, Any]) -> float:  # noqa: ARG002
        wanted = [as_text(reference) for reference in references]
        return float(_scorer().score_multi(wanted, as_text(prediction))["rougeL"].fmeasure)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError(
            f"metric rouge_l needs the library rouge-score ({error}): pip install rouge-score, "
            f"or leave rouge out of {named('metrics')}"
        ) from error
    return RougeScorer(["rougeL"], use_stemmer=False)
