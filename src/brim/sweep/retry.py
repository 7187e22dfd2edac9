"""What is tried after an experiment has failed: the same samples in smaller micro-batches, or nothing. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from brim.sweep.job import Job, Outcome

__all__ = ["MOST_RETRIES", "next_attempt"]

MOST_RETRIES = 2
MARGINS = (0.25, 0.5)  # of the device's memory that a planned size leaves free at each retry


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
    changes: dict[str, Any] = {"hp.batch_size": size}
    asked = job.run_settings.get("hp") or {}
    if asked.get("effective_batch") is None:
        changes["hp.effective_batch"] = effective_batch or tried
    if asked.get("base_batch") is None:
        changes["hp.base_batch"] = tried
    return _changed(again, changes, because)


def _changed(job: Job, changes: dict[str, Any], because: str) -> Job:
    told = f"{job.changed_because}; {because}" if job.changed_because else because
    return dataclasses.replace(job, changes={**job.changes, **changes}, changed_because=told, alone=True)
