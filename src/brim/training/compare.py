"""Several effective batches on the same data, before anyone settles on one: short trials, forecast beside measured.

Every trial starts from the same weights and sees the same number of samples, so that final losses can be compared; the
learning rate follows the batch as the settings say.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.errors import DoesNotFitError, RequestError
from brim.memory.devices import memory_of
from brim.memory.weights import place_weights
from brim.ranks.world import current_world
from brim.settings.caller import named
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import TrainSettings
from brim.training.listener import TrainListener
from brim.training.memory_forecast import forecast_peak_bytes
from brim.training.run import TrainResult, run_training
from brim.training.run_files import read_steps
from brim.training.setup import open_setup

__all__ = ["compare_effective_batches", "risk_of"]

STEPS = 4  # of the largest size: the first ones only find the micro-batch
FEWEST_SAMPLES = 256
MEASURING_STEPS = 2  # on the CPU, where the meter is off while trials are timed


def compare_effective_batches(
    request: TrainRequest, sizes: Sequence[int], *, listener: TrainListener | None = None
) -> list[dict[str, Any]]:
    """One row per size, in the order given; the speed-up is over the first."""
    if current_world().size > 1:
        raise RequestError(f"{named('compare_batch')}: sizes are compared on one device; start it without torchrun")
    watcher = listener or TrainListener()
    subject = open_setup(request.settings)
    subject.model.to("cpu")  # out of the trials' way: it is only forecast
    memory_of(subject.device).release()
    samples = len(subject.data.train)
    seen = max(STEPS * min(max(sizes), samples), FEWEST_SAMPLES)  # by each trial
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place, size in enumerate(sizes):
            effective = min(size, samples)
            if effective < size:
                watcher.note(f"a batch of {size} is more than the {samples} training samples: {effective} is tried")
            trial = _trial_request(request, effective, seen, samples)
            row: dict[str, Any] = {"batch_size": size, "effective_batch_size": effective}
            try:
                result = run_training(trial, output=Path(folder) / str(place), listener=_OnlyNotes(watcher))
                row |= _measured(result, request.settings, samples, effective)
                if row["peak_reserved_bytes"] is None:
                    row |= _measure_memory(trial, Path(folder) / f"{place}-memory")
                memory_of(subject.device).release()
                place_weights(subject.model, subject.device, name=subject.bundle.name)
                row["forecast_peak_bytes"] = forecast_peak_bytes(subject, row["micro_batch_size"])
                subject.model.to("cpu")
            except DoesNotFitError as error:
                row |= {"failed": str(error).splitlines()[0]}
            row["risk"] = risk_of(row)
            rows.append(row)
            memory_of(subject.device).release()
    first = next((row["samples_per_second"] for row in rows if row.get("samples_per_second")), None)
    for row in rows:
        rate = row.get("samples_per_second")
        row["speed_up"] = rate / first if rate and first else None
    return rows


def risk_of(row: dict[str, Any]) -> str:
    """How likely a run at this size is to run out of memory, by what the trial left free."""
    if row.get("failed"):
        return "does not fit"
    if row.get("oom_events"):
        return "ran out, survived"
    headroom = row.get("headroom_fraction")
    if headroom is None:
        return "unknown"
    return "low" if headroom >= 0.2 else "medium" if headroom >= 0.1 else "high"


def _trial_request(request: TrainRequest, effective: int, seen: int, samples: int) -> TrainRequest:
    settings = request.settings
    steps = max(math.ceil(seen / effective), 2)
    hp = dataclasses.replace(
        settings.hp,
        effective_batch=effective,
        base_batch=settings.hp.base_batch or _base_batch(settings),
        max_steps=steps,
        epochs=math.ceil(steps * effective / samples) + 1,
    )
    training = dataclasses.replace(
        settings.training, checkpoint_every=None, early_stopping=None, monitor="loss", eval_every=1
    )
    scheduler = dataclasses.replace(settings.scheduler, name="none", params={})
    trial = dataclasses.replace(settings, hp=hp, training=training, scheduler=scheduler)
    return dataclasses.replace(request, settings=trial, use_cache=False, resume=False, validate=False)


def _base_batch(settings: TrainSettings) -> int | None:
    return settings.hp.batch_size if isinstance(settings.hp.batch_size, int) else None


def _measured(result: TrainResult, settings: TrainSettings, samples: int, effective: int) -> dict[str, Any]:
    summary = result.summary
    steps = read_steps(result.folder / "steps.jsonl")
    whole = [step for step in steps if step["effective_batch"] == effective]  # the last of an epoch may be shorter
    steady = whole[len(whole) // 2 :]  # the first ones find the size
    rate = statistics.median(step["effective_batch"] / step["seconds"] for step in steady)
    limit = result.plan.memory.limit_bytes if result.plan is not None else None
    peak = summary["peak_reserved_bytes"]
    return {
        "micro_batch_size": max(steady[-1]["micro_batches"]),
        "accumulation_steps": len(steady[-1]["micro_batches"]),
        "samples_per_second": rate,
        "peak_allocated_bytes": summary["peak_allocated_bytes"],
        "peak_reserved_bytes": peak,
        "limit_bytes": limit,
        "headroom_fraction": None if not peak or not limit else 1 - peak / limit,
        "gpu_utilisation_mean": summary["gpu_utilisation_mean"],
        "steps_per_epoch": math.ceil(samples / effective),
        "epoch_seconds": samples / rate,
        "total_seconds": samples / rate * settings.hp.epochs,
        "final_loss": statistics.fmean(step["loss"] for step in steps[-max(len(steps) // 4, 1) :]),
        "trial_samples": summary["samples"],
        "loss_curve": summary["loss_curve"],
        "oom_events": summary["oom_events"],
        "learning_rate": summary["learning_rate"]["base"] * summary["learning_rate"]["factor"],
    }


def _measure_memory(trial: TrainRequest, folder: Path) -> dict[str, Any]:
    """Two steps with the CPU's meter on, under all the memory there is."""
    settings = trial.settings
    limit = memory_of("cpu").available_bytes() * 9 // 10  # what is available moves a little
    training = dataclasses.replace(settings.training, memory_limit=str(limit))
    hp = dataclasses.replace(settings.hp, max_steps=MEASURING_STEPS)
    measured = dataclasses.replace(trial, settings=dataclasses.replace(settings, hp=hp, training=training))
    summary = run_training(measured, output=folder).summary
    peak = summary["peak_reserved_bytes"]
    return {
        "peak_allocated_bytes": summary["peak_allocated_bytes"],
        "peak_reserved_bytes": peak,
        "limit_bytes": limit,
        "headroom_fraction": 1 - peak / limit,
    }


class _OnlyNotes(TrainListener):
    """Passes on what went wrong, not how it went."""

    def __init__(self, other: TrainListener) -> None:
        self._other = other

    def note(self, line: str) -> None:
        """As it is."""
        self._other.note(line)
