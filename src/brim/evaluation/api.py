"""`brim.evaluate`: a whole evaluation as one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from brim.errors import RequestError, nearest_names
from brim.evaluation.request import EvalRequest
from brim.evaluation.run import EvalResult
from brim.evaluation.run import evaluate as run_evaluation

__all__ = ["eval_request", "evaluate"]

_LISTS = ("metrics", "plugins", "stop")


def evaluate(
    model: str,
    data: str | Path,
    *,
    batch_size: int | Literal["auto"] = "auto",
    output: str | Path | None = None,
    **settings: Any,
) -> EvalResult:
    """Evaluate a model on a data set, every sample once, and leave the run's folder behind: `brim eval` from Python.

        result = brim.evaluate("./my-model", "questions.jsonl", metrics="exact_match,rouge", max_new_tokens=64)
        result.metrics["exact_match"]["value"]
        result.samples[0]["prediction"]

    `settings` are the fields of `brim.evaluation.request.EvalRequest`. A sample that fails has its error in `samples`
    and counts as wrong; it does not raise.
    """
    known = {field.name for field in dataclasses.fields(EvalRequest)} - {"model", "data", "batch_size"}
    for name in settings:
        if name not in known:
            raise RequestError(f"evaluate() has no setting {name!r}{nearest_names(name, known)}")
    request = eval_request(model, data, batch_size, settings)
    return run_evaluation(request, output=None if output is None else Path(output))


def eval_request(
    model: str, data: str | Path, batch_size: int | Literal["auto"], settings: Mapping[str, Any]
) -> EvalRequest:
    """The request of a call, in which lists may be text with commas, as on the command line."""
    if batch_size != "auto" and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
        raise RequestError(f"batch_size={batch_size!r}: give 'auto' or a whole number from 1")
    lists = {name: _listed(settings[name]) for name in _LISTS if name in settings}
    return EvalRequest(
        model=str(model),
        data=str(data),
        batch_size=None if batch_size == "auto" else batch_size,
        **{**settings, **lists},
    )


def _listed(value: str | Sequence[str]) -> tuple[str, ...]:
    """A list, or text with commas as on the command line."""
    return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
