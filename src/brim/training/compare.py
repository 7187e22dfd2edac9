"""Several effective batches compared in short trial runs on the same data, with forecast and measured memory.

Every trial starts from the same weights and trains on the same number of samples, so that final losses can be compared;
the learning rate follows the batch as the settings ask.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.errors import DoesNotFitError
from brim.memory.devices import memory_of
from brim.memory.weights import place_weights
from brim.ranks.world import refuse_ranks
from brim.settings.caller import named
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import TrainSettings
from brim.training.listener import TrainListener
from brim.training.memory_forecast import forecast_peak_bytes
from brim.training.run import TrainResult, run_training
from brim.training.run_files import read_steps
from brim.training.setup import TrainingSetup, open_setup

__all__ = ["compare_effective_batches"]

STEPS = 4  # of the largest batch in a trial: the first steps search for the micro-batch
MIN_SAMPLES = 256  # of a trial
MEASURING_STEPS = 2  # of a second trial on the CPU, whose memory is not measured while steps are timed


def compare_effective_batches(
    request: TrainRequest, sizes: Sequence[int], *, listener: TrainListener | None = None
) -> list[dict[str, Any]]:
    """One row for each size, in the order given; the speed-up is relative to the first that ran."""
    refuse_ranks(f"{named('compare_batch')}: sizes are compared on one device")
    watcher = listener or TrainListener()
    setup = open_setup(request.settings)
    setup.model.to("cpu")  # leave the device to the trials; this model is only used for forecasts
    memory_of(setup.device).release()
    samples = len(setup.data.train)
    trial_samples = max(STEPS * min(max(sizes), samples), MIN_SAMPLES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place, size in enumerate(sizes):
            effective = min(size, samples)
            if effective < size:
                watcher.note(f"a batch of {size} is more than the {samples} training samples: {effective} is tried")
            trial = _trial_request(request, effective, trial_samples, samples)
            row: dict[str, Any] = {"batch_size": size, "effective_batch_size": effective}
            try:
                row |= _run_trial(trial, setup, request.settings, Path(folder) / str(place), watcher)
            except DoesNotFitError as error:
                row |= {"failed": str(error).splitlines()[0]}
            row["risk"] = _oom_risk(row)
            rows.append(row)
            memory_of(setup.device).release()
    first = next((row["samples_per_second"] for row in rows if row.get("samples_per_second")), None)
    for row in rows:
        rate = row.get("samples_per_second")
        row["speed_up"] = rate / first if rate and first else None
    return rows


def _oom_risk(row: dict[str, Any]) -> str:
    """How likely a run at this size is to run out of memory, by the memory that the trial left free."""
    if row.get("failed"):
        return "does not fit"
    if row.get("oom_events"):
        return "ran out, survived"
    headroom = row.get("headroom_fraction")
    if headroom is None:
        return "unknown"
    return "low" if headroom >= 0.2 else "medium" if headroom >= 0.1 else "high"


def _run_trial(
    trial: TrainRequest, setup: TrainingSetup, settings: TrainSettings, folder: Path, watcher: TrainListener
) -> dict[str, Any]:
    """Measured speed, loss and memory of a trial, and its forecast memory."""
    result = run_training(trial, output=folder, listener=_NotesOnly(watcher))
    effective = trial.settings.hp.effective_batch
    assert isinstance(effective, int)  # set by _trial_request
    row = _measured(result, settings, len(setup.data.train), effective)
    if row["peak_reserved_bytes"] is None:
        row |= _measure_memory(trial, folder.with_name(f"{folder.name}-memory"))
    memory_of(setup.device).release()
    place_weights(setup.model, setup.device, name=setup.bundle.name)
    row["forecast_peak_bytes"] = forecast_peak_bytes(setup, row["micro_batch_size"])
    setup.model.to("cpu")
    return row


def _trial_request(request: TrainRequest, effective: int, trial_samples: int, samples: int) -> TrainRequest:
    """A short run at an effective batch: no validation, checkpoints, scheduler, cached plan or early stop."""
    settings = request.settings
    steps = max(math.ceil(trial_samples / effective), 2)
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
    whole = [step for step in steps if step["effective_batch"] == effective]  # the last step of an epoch may be smaller
    steady = whole[len(whole) // 2 :]  # the first steps search for the micro-batch
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
    """Memory of two steps on the CPU, measured under a limit of almost all available memory."""
    settings = trial.settings
    limit = memory_of("cpu").available_bytes() * 9 // 10  # the available memory changes a little from run to run
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


class _NotesOnly(TrainListener):
    """Forwards notes to another listener, but no progress."""

    def __init__(self, other: TrainListener) -> None:
        self._other = other

    def note(self, line: str) -> None:
        """Forward a note."""
        self._other.note(line)
