"""`brim.profile_knob`: a whole profile as one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from brim.errors import RequestError, nearest_names
from brim.evaluation.api import eval_request
from brim.evaluation.request import EvalRequest
from brim.profiling.request import ProfileRequest
from brim.profiling.run import ProfileResult, profile

__all__ = ["profile_knob"]


def profile_knob(
    model: str,
    data: str | Path,
    knobs: str | Mapping[str, Sequence[Any] | None],
    *,
    batch_size: int | Literal["auto"] = "auto",
    output: str | Path | None = None,
    **settings: Any,
) -> ProfileResult:
    """Evaluate a model at every value of its knobs: `brim profile` from Python.

        result = brim.profile_knob("./my-vlm", "vqa/", {"max_crops": range(2, 14)}, batch_size=64)
        [(entry["max_crops"], entry["accuracy"]) for entry in result.entries]
        result.document["recommendation"]["text"]

    A knob alone, as text or with None for its values, has its whole range. `settings` are the fields of
    `brim.profiling.request.ProfileRequest` and `brim.evaluation.request.EvalRequest`.
    """
    axes = {knobs: None} if isinstance(knobs, str) else {name: _listed(values) for name, values in knobs.items()}
    own = {field.name for field in dataclasses.fields(ProfileRequest)} - {"base", "axes"}
    known = own | {field.name for field in dataclasses.fields(EvalRequest)}
    for name in settings:
        if name not in known:
            raise RequestError(f"profile_knob() has no setting {name!r}{nearest_names(name, known)}")
    base = eval_request(model, data, batch_size, {name: value for name, value in settings.items() if name not in own})
    request = ProfileRequest(base=base, axes=axes, **{name: value for name, value in settings.items() if name in own})
    return profile(request, output=None if output is None else Path(output))


def _listed(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
