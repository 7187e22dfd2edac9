"""MLflow: at `MLFLOW_TRACKING_URI`, else under `mlflow/` in the run's folder. The only file that imports it.

A client of its own is used: a run that the caller has open, and the tracking address that it has set, stay as they are.
The folder holds plain files, which mlflow-skinny writes too; recent versions want to be asked for them by a variable.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.monitor.loggers.base import EndedRun, Logger, Parameter, RunLog

__all__ = ["MlflowLogger"]

MOST_PARAMETERS = 100  # in one call
MOST_CHARACTERS = 500  # of a parameter or a tag, which every store takes
_NOT_IN_A_NAME = re.compile(r"[^\w./ -]")


class MlflowLogger(Logger):
    """One run for each, in the experiment named after the folder."""

    extra = "mlflow"

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # where `--json` has its document
        import mlflow
        import mlflow.entities

        self._mlflow, self._entities = mlflow, mlflow.entities
        self._folder = folder.absolute()

    def open_run(self, name: str, parameters: Mapping[str, Parameter]) -> RunLog:
        """The experiment is made with its first run."""
        where = None
        if not self._mlflow.is_tracking_uri_set():
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = (self._folder / "mlflow").as_uri()
        client = self._mlflow.MlflowClient(tracking_uri=where)
        title = self._folder.name or "brim"
        found = client.get_experiment_by_name(title)
        experiment = client.create_experiment(title) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=name)
        return _MlflowRun(client, self._entities, run.info.run_id, parameters)


class _MlflowRun(RunLog):
    def __init__(self, client: Any, entities: Any, run_id: str, parameters: Mapping[str, Parameter]) -> None:
        self._client, self._entities, self._run_id = client, entities, run_id
        self._last_step = 0
        listed = [entities.Param(_name(key), str(value)[:MOST_CHARACTERS]) for key, value in parameters.items()]
        for start in range(0, len(listed), MOST_PARAMETERS):
            client.log_batch(run_id, params=listed[start : start + MOST_PARAMETERS])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """All figures of a step in one call."""
        self._last_step = step
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_name(name), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, ended: EndedRun) -> None:
        """The summary as metrics, the rest as tags."""
        self.log(ended.figures, self._last_step)
        texts = {"state": ended.state, "failure": ended.failure, "error": ended.error}
        tags = [self._entities.RunTag(key, value[:MOST_CHARACTERS]) for key, value in texts.items()]
        self._client.log_batch(self._run_id, tags=tags)
        status = {"completed": "FINISHED", "interrupted": "KILLED"}.get(ended.state, "FAILED")
        self._client.set_terminated(self._run_id, status=status)


def _name(text: str) -> str:
    return _NOT_IN_A_NAME.sub("_", text)
