"""One page of every kind of training, and of the awkward ones: a function that writes it and gives its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from brim.reporting.write import write_comparison, write_report
from tests.reporting.trained_runs import (
    epoch_lines,
    preference_cells,
    step_lines,
    train_request,
    training_plan,
    training_summary,
    write_preference,
    write_seeds,
    write_training,
)


def training(folder: Path) -> Path:
    return write_report(write_training(folder))


def short_training(folder: Path) -> Path:
    """One epoch of one step on a CPU without a meter: hardly anything is known."""
    steps = [{**step_lines()[0], "loss": 1.25}]
    epochs = [{**epoch_lines(steps)[0], "peak_reserved_bytes": ""}]
    summary = training_summary(
        steps, epochs, noise_scale=None, effective_batches=[], peak_reserved_bytes=None, peak_allocated_bytes=None,
        gpu_utilisation_mean=None, notes=[],
    )  # fmt: skip
    unmetered = {"peak_reserved_bytes": None, "samples_per_second": None}
    plan = training_plan()
    plan["probes"] = [{**probe, **unmetered} for probe in plan["probes"][:2]]
    return write_report(write_training(folder, steps=steps, epochs=epochs, summary=summary, plan=plan, gpu=False))


def training_of_values(folder: Path) -> Path:
    """A regression over three seeds: an error that is no fraction, and a loss over four orders of magnitude."""
    steps = [{**line, "loss": 900 / line["samples"]} for line in step_lines(grows=False, ooms=())]
    epochs = epoch_lines(steps, ("mae",))
    seeds = {"mean": 0.41, "deviation": 0.02, "values": [0.39, 0.41, 0.43]}
    summary = training_summary(steps, epochs, metrics={"val_loss": seeds, "mae": seeds}, seeds=[0, 1, 2])
    return write_report(write_training(folder, steps=steps, epochs=epochs, summary=summary))


def training_of_seeds(folder: Path) -> Path:
    """Three seeds at two learning rates, each with a folder of its own; one of them failed and has none."""
    return write_report(write_seeds(folder))


def bare_training(folder: Path) -> Path:
    """Nothing but run.json."""
    write_training(folder, steps=[], epochs=[], summary={}, plan={})
    (folder / "steps.jsonl").unlink()
    (folder / "monitor.csv").unlink()
    return write_report(folder)


def preference(folder: Path) -> Path:
    return write_report(write_preference(folder))


def one_seed_preference(folder: Path) -> Path:
    return write_report(write_preference(folder, preference_cells(("in-vs-out",), seeds=1)))


def compared_trainings(folder: Path) -> Path:
    """Old and new settings: a batch four times as large is faster, and needs more samples for the same loss."""
    old = step_lines(batch=128, grows=False, ooms=(), pace=1.25, rate=290.0)
    epochs = epoch_lines(old, pace=1.25)
    runs = [
        write_training(folder / "old", steps=old, epochs=epochs, request=train_request(effective_batch=128)),
        write_training(folder / "new", request=train_request(effective_batch="auto")),
    ]
    write_comparison(runs, folder / "compared.html")
    return folder / "compared.html"


TRAINED_PAGES: dict[str, Callable[[Path], Path]] = {
    function.__name__: function
    for function in (
        training, short_training, training_of_values, training_of_seeds, bare_training, preference, one_seed_preference,
        compared_trainings,
    )
}  # fmt: skip
