"""TensorBoard: event files under `tensorboard/` in the run's folder. The only file that imports it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.monitor.loggers.base import EndedRun, Logger, Parameter, RunLog

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Logger):
    """A folder of event files for each run."""

    extra = "log"

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # without it torch's writer cannot be imported, with a longer message
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter
        self._folder = folder / "tensorboard"

    def open_run(self, name: str, parameters: Mapping[str, Parameter]) -> RunLog:
        """The writer makes the folder."""
        return _TensorBoardRun(self._writer(str(self._folder / name)), parameters)


class _TensorBoardRun(RunLog):
    """The parameters are written with the summary: TensorBoard's table of runs shows the two together."""

    def __init__(self, writer: Any, parameters: Mapping[str, Parameter]) -> None:
        self._writer = writer
        self._parameters = dict(parameters)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """A point of each curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def end(self, ended: EndedRun) -> None:
        """The parameters with the figures that they led to."""
        parameters = {**self._parameters, "state": ended.state}
        if not ended.completed:
            parameters |= {"failure": ended.failure, "error": ended.error}
        self._writer.add_hparams(parameters, dict(ended.figures), run_name=".")
        self._writer.close()
