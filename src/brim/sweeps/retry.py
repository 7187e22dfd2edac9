"""The same samples in smaller micro-batches: from the start where a forecast says so, and after a failure. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import Job, Outcome

__all__ = ["MOST_RETRIES", "first_attempt", "next_attempt"]

MOST_RETRIES = 2
MARGINS = (0.25, 0.5)  # of the device's memory that a planned size leaves free at each retry


def first_attempt(job: Job, forecast: SizeForecast | None) -> Job:
    """The job as it starts: a batch size that is forecast not to fit becomes the micro-batches that do.

    With `fail_on_oom` the size is exactly the one asked for.
    """
    asked, hyper = job.batch_size, job.settings.get("hp") or {}
    if not isinstance(asked, int):
        return job
    # A batch size that is given is the effective batch as well: named, it stays when micro-batches are made smaller.
    changes = {"hp.effective_batch": asked} if hyper.get("effective_batch") is None else {}
    fitting = 0 if forecast is None or forecast.fits is not False else forecast.batch_size_max or 0
    if job.fail_on_oom or not 0 < fitting < asked:
        return dataclasses.replace(job, changes=changes)
    because = f"{asked} is forecast not to fit: in micro-batches of at most {fitting}"
    changes = {**changes, **_smaller(hyper, size=fitting, asked=asked, effective_batch=asked)}
    return dataclasses.replace(job, changes=changes, changed_because=because)


def next_attempt(
    job: Job, outcome: Outcome, *, planned: int | None, effective_batch: int | None, retry: bool = True
) -> Job | None:
    """The next attempt after a failure, or None: it stays failed.

    Out of memory: alone on its device, at `planned` samples (the largest size forecast to fit) where that is less than
    what was tried, else at half. The effective batch and the batch that the learning rate was chosen for stay, so that
    what is learnt stays. A process whose device or machine was lost is started again as it was.
    """
    if not retry or outcome.state != "failed" or job.retries >= MOST_RETRIES:
        return None
    again = dataclasses.replace(job, attempt=job.attempt + 1, retries=job.retries + 1)
    if outcome.failure == "lost":
        return again
    if outcome.failure != "out_of_memory":
        return None
    tried = job.changes.get("hp.batch_size", job.batch_size)
    if not isinstance(tried, int):
        margin = MARGINS[job.retries]
        because = f"ran out of memory; planned again with {margin:.0%} of the memory kept free"
        return _changed(again, {"training.margin": margin}, because)
    if tried <= 1:
        return None
    size = planned if planned is not None and 0 < planned < tried else tried // 2
    because = f"{tried} ran out of memory: retried at {size}" + (" (forecast to fit)" if size == planned else "")
    hyper = job.run_settings.get("hp") or {}
    changes = _smaller(hyper, size=size, asked=tried, effective_batch=effective_batch or tried)
    return _changed(again, changes, because)


def _smaller(hyper: Mapping[str, Any], *, size: int, asked: int, effective_batch: int) -> dict[str, Any]:
    """Settings for micro-batches of at most `size`: an optimizer step and its learning rate stay as they are."""
    kept = {"hp.effective_batch": effective_batch, "hp.base_batch": asked}
    return {
        "hp.batch_size": size,
        **{key: value for key, value in kept.items() if hyper.get(key.removeprefix("hp.")) is None},
    }


def _changed(job: Job, changes: dict[str, Any], because: str) -> Job:
    told = f"{job.changed_because}; {because}" if job.changed_because else because
    return dataclasses.replace(job, changes={**job.changes, **changes}, changed_because=told, alone=True)
