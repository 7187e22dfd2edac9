"""Several effective batches compared in short trial runs on the same data, with forecast and measured memory.

The trials take turns, each size several times. Every trial starts from the same weights and trains on the same number
of samples, so that final losses can be compared; the learning rate follows the batch as the settings ask.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.comparing.record import Comparison, kept_comparison
from brim.comparing.rounds import RoundRules
from brim.comparing.sizes import ComparedSizes, measure_sizes
from brim.memory.devices import memory_of
from brim.memory.environment import environment_facts
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
    request: TrainRequest,
    sizes: Sequence[int],
    *,
    output: Path | None = None,
    listener: TrainListener | None = None,
    rules: RoundRules | None = None,
) -> Comparison:
    """One row for each size, in the order given, and the run's folder; the speed-up is over the first that ran."""
    refuse_ranks(f"{named('compare_batch')}: sizes are compared on one device")
    watcher = listener or TrainListener()
    quiet = _NotesOnce(watcher)
    asked = {**request.to_json(), "compare_batch": list(sizes)}
    with kept_comparison(output, command="train --compare-batch", request=asked, note=watcher.note) as draft:
        setup = open_setup(request.settings)
        setup.model.to("cpu")  # leave the device to the trials; this model is only used for forecasts
        memory_of(setup.device).release()
        draft.environment = json.loads(json.dumps(environment_facts(setup.device), default=str))
        samples = len(setup.data.train)
        trial_samples = max(STEPS * min(max(sizes), samples), MIN_SAMPLES)
        table = ComparedSizes(sizes, rules=rules, derive=lambda row: _times(row, request.settings, samples))
        draft.table, draft.notes = table, quiet.notes

        def measure(size: int, first: bool) -> dict[str, Any]:
            effective = min(size, samples)
            if effective < size:
                quiet.note(f"a batch of {size} is more than the {samples} training samples: {effective} is tried")
            trial = _trial_request(request, effective, trial_samples, samples)
            with tempfile.TemporaryDirectory() as folder:
                figures = _run_trial(trial, setup, Path(folder), quiet, memory=first)
            return {"effective_batch_size": effective, **figures}

        measure_sizes(table, measure, watcher.note)
    return draft.comparison()


def _times(row: dict[str, Any], settings: TrainSettings, samples: int) -> dict[str, Any]:
    """What follows from the rate."""
    epoch = samples / row["samples_per_second"]
    return {"epoch_seconds": epoch, "total_seconds": epoch * settings.hp.epochs}


def _run_trial(
    trial: TrainRequest, setup: TrainingSetup, folder: Path, watcher: TrainListener, *, memory: bool
) -> dict[str, Any]:
    """Measured speed and loss of a trial; with `memory` also its forecast memory, and on the CPU the measured one."""
    result = run_training(trial, output=folder / "trial", listener=watcher)
    effective = trial.settings.hp.effective_batch
    assert isinstance(effective, int)  # set by _trial_request
    row = _measured(result, len(setup.data.train), effective)
    memory_of(setup.device).release()
    if not memory:
        return row
    if row["peak_reserved_bytes"] is None:
        row |= _measure_memory(trial, folder / "memory")
        memory_of(setup.device).release()
    place_weights(setup.model, setup.device, name=setup.bundle.name)
    row["forecast_peak_bytes"] = forecast_peak_bytes(setup, row["micro_batch_size"])
    setup.model.to("cpu")
    memory_of(setup.device).release()
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


def _measured(result: TrainResult, samples: int, effective: int) -> dict[str, Any]:
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


class _NotesOnce(TrainListener):
    """Forwards each note once, but no progress: every size is trained again and again."""

    def __init__(self, other: TrainListener) -> None:
        self.notes: list[str] = []
        self._other = other

    def note(self, line: str) -> None:
        """Forward a note that is new."""
        if line not in self.notes:
            self.notes.append(line)
            self._other.note(line)
