"""Weights & Biases: offline, under `wandb/` in the run's folder, unless the environment says otherwise.

The only file that imports it. `WANDB_MODE` or `WANDB_API_KEY` in the environment leaves the mode to wandb: without
either it would stop to ask for a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.monitor.loggers.base import EndedRun, Logger, Parameter, RunLog

__all__ = ["WandbLogger"]


class WandbLogger(Logger):
    """One run for each, grouped by the folder; project and entity are those of wandb's own variables."""

    extra = "wandb"

    def __init__(self, folder: Path) -> None:
        import wandb

        self._wandb = wandb
        self._folder = folder

    def open_run(self, name: str, parameters: Mapping[str, Parameter]) -> RunLog:
        """A run of its own beside any that the caller has open; the terminal is left alone."""
        asked = any(os.environ.get(variable) for variable in ("WANDB_MODE", "WANDB_API_KEY"))
        run = self._wandb.init(
            name=name, group=self._folder.absolute().name, config=dict(parameters), dir=str(self._folder),
            mode=None if asked else "offline", reinit="create_new", settings={"silent": True, "console": "off"},
        )  # fmt: skip
        return _WandbRun(run)


class _WandbRun(RunLog):
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """One row of its history."""
        self._run.log(dict(figures), step=step)

    def end(self, ended: EndedRun) -> None:
        """The summary, and an exit code for its list of runs."""
        texts = {"state": ended.state, "failure": ended.failure, "error": ended.error}
        self._run.summary.update({**ended.figures, **texts})
        self._run.finish(exit_code=0 if ended.completed else 1)
