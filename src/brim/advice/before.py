"""Advice before a run: from the data's lengths, its reference answers, cached plans and a forecast. Needs no GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from brim.advice.base import Advice, ordered
from brim.advice.rules_answers import expected_answers, tokens_of
from brim.advice.run_reader import Run
from brim.advice.run_requests import command_with
from brim.data.base import SampleSet
from brim.evaluation.setup import read_data
from brim.settings.declare import read_settings
from brim.settings.eval_settings import EvalRequest
from brim.settings.forecast_settings import ForecastSettings
from brim.sizing.plans import PlanCache
from brim.units import fraction_text

__all__ = ["advise_before"]

LEAST_PADDING = 0.3
FEW = 8  # samples in a batch


def advise_before(
    request: EvalRequest, *, gpu: str | None = None, note: Callable[[str], None]
) -> tuple[list[Advice], list[str]]:
    """The pieces of advice for an evaluation that is to come, and what else is known of it."""
    data = read_data(request)
    notes = _plan_notes(request)
    largest = None if gpu is None else _forecast(request, gpu, note)
    if largest is not None:
        notes.append(f"forecast for {gpu}: batches of up to {largest:,} of the costliest sample fit")
    references = [sample.references for sample in data.samples]
    pieces = ordered([expected_answers(request, references), _size(request, data, largest), _mixed(request, data)])
    alone = Run(folder=Path(), kind="eval", document={"request": request.to_json(), "summary": {}})
    return [dataclasses.replace(one, command=command_with(alone, one)) for one in pieces], notes


def _plan_notes(request: EvalRequest) -> list[str]:
    """Sizes that earlier evaluations of the model settled at."""
    return [
        f"a cached plan of {one.model} ({one.work}) on {one.plan.device}: {one.plan.size:,} {one.plan.unit} in a batch"
        for one in PlanCache().entries()
        if one.command == "eval" and one.model.removeprefix("hf:") == request.model.removeprefix("hf:")
    ][:3]


def _forecast(request: EvalRequest, gpu: str, note: Callable[[str], None]) -> int:
    from brim.planning.forecast import forecast

    asked = {"model": request.model, "data": request.data, "gpu": gpu}
    more = {"task": request.task, "max_tokens": request.max_new_tokens, "dtype": request.dtype}
    settings = read_settings(ForecastSettings, {**asked, **{name: one for name, one in more.items() if one}})
    return forecast(settings, note=note).batch_size_max


def _size(request: EvalRequest, data: SampleSet, largest: int | None) -> Advice | None:
    """A size that was given and does not fit, or is few."""
    size = request.batch_size
    if size is None:
        return None
    if largest is not None and size > largest:
        cause, why = f"batches of {size} do not fit", f"a forecast says that {largest:,} do"
    elif size < FEW and size < len(data.samples):
        cause, why = f"batches of {size}, which is few for any device", f"there are {len(data.samples):,} samples"
    else:
        return None
    return Advice(
        name="batch_size", cause=cause, evidence=f"{why}; auto finds the fastest size that fits: not measured",
        settings={"batch_size": "auto"},
    )  # fmt: skip


def _mixed(request: EvalRequest, data: SampleSet) -> Advice | None:
    """Prompts of very different lengths in batches of so many samples."""
    size = request.batch_size
    prompts = [sample.prompt for sample in data.samples if sample.prompt]
    if size is None or len(prompts) < 2 or any(sample.images for sample in data.samples):
        return None
    found = tokens_of(request.model, prompts, trust=request.trust_remote_code)
    if found is None:
        return None
    longest_first = found.lengths[::-1]
    padded = sum(
        longest_first[start] * min(size, len(longest_first) - start) for start in range(0, len(longest_first), size)
    )
    wasted = 1 - sum(longest_first) / max(padded, 1)
    if wasted < LEAST_PADDING:
        return None
    return Advice(
        name="padding",
        cause=f"{fraction_text(wasted)} of the prompts' tokens would be padding",
        evidence=f"in {math.ceil(len(prompts) / size):,} batches of {size}, prompts of {found.lengths[0]} to "
        f"{found.lengths[-1]} tokens are padded to the longest; batches by cost (auto) avoid most of it: not measured",
        settings={"batch_size": "auto"},
    )
