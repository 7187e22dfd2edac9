"""The files that a training leaves beside run.json: steps.jsonl, epochs.csv, and of preference training cells.jsonl.

It knows where they lie and that a kill may have cut them, not what is shown of them.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from typing import Any

from brim.reporting.read import Run, Samples
from brim.reporting.rows.training import StepDigest, digest_steps, epoch_rows
from brim.reporting.units import number

__all__ = ["TrainingRun", "is_preference", "read_cells", "read_training", "subject_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A supervised training: its run, its steps folded to what a screen shows, and its epochs."""

    run: Run
    steps: StepDigest
    epochs: list[dict[str, Any]]
    damaged: int  # lines of steps.jsonl that could not be read

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.run.summary

    @property
    def limit_bytes(self) -> float | None:
        """The memory limit that the plan was made for."""
        memory = self.run.plan.get("memory")
        return number(memory.get("limit_bytes")) if isinstance(memory, dict) else None


def is_preference(run: Run) -> bool:
    """Whether the run is one of `brim train dpo`: a table of methods instead of epochs."""
    return run.request.get("command") == "train dpo" or isinstance(run.summary.get("table"), list)


def read_training(run: Run) -> TrainingRun:
    """The files of a supervised training; one that is missing or damaged has no rows."""
    lines = Samples(run.folder / "steps.jsonl")
    digest = digest_steps(lines)
    return TrainingRun(run=run, steps=digest, epochs=_epochs(run), damaged=lines.damaged)


def _epochs(run: Run) -> list[dict[str, Any]]:
    try:
        with (run.folder / "epochs.csv").open(encoding="utf-8", errors="replace", newline="") as file:
            return epoch_rows(csv.DictReader(file), best=number(run.summary.get("best_epoch")))
    except (OSError, csv.Error):
        return []


def read_cells(run: Run) -> list[dict[str, Any]]:
    """Every cell of a preference training, as the journal has it; of one that was made again, the last."""
    found = {}
    for line in Samples(run.folder / "cells.jsonl"):
        if "method" in line:
            found[tuple(str(line.get(field)) for field in ("data", "encoder", "method", "seed"))] = line
    return list(found.values())


def subject_of(run: Run) -> tuple[str, str]:
    """What was trained, and on what."""
    settings = run.request.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    model, data = (part if isinstance(part, dict) else {} for part in (settings.get("model"), settings.get("data")))
    name = data.get("root") or (data.get("type") if data.get("type") not in (None, "auto") else "moving shapes")
    return str(model.get("type") or "a model"), str(name)
