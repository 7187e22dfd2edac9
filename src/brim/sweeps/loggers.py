"""TensorBoard, MLflow and Weights & Biases, each when it is installed and asked for. The only file that imports them.

An experiment is logged when it has ended, with all its epochs: a retry or a resumed sweep leaves no half curves, and
each experiment is there once. A logger that fails is reported and left out; no experiment is lost for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from brim.errors import RequestError
from brim.settings.caller import given
from brim.settings.nested_keys import flatten
from brim.sweeps.job import AttemptOutcome, Job

__all__ = ["Logger", "Loggers", "open_loggers"]


class Logger(Protocol):
    """Where the curves of experiments go."""

    def log(self, job: Job, outcome: AttemptOutcome) -> None:
        """One experiment that has ended."""

    def close(self) -> None:
        """Nothing more will come."""


class Loggers:
    """All that were asked for, as one; the first failure of each is noted, and it gets no more experiments."""

    def __init__(self, members: Mapping[str, Logger], note: Callable[[str], None]) -> None:
        self._members = dict(members)
        self._note = note

    def log(self, job: Job, outcome: AttemptOutcome) -> None:
        """One experiment that has ended."""
        self._each("log", job, outcome)

    def close(self) -> None:
        """Nothing more will come."""
        self._each("close")

    def _each(self, what: str, *arguments: Any) -> None:
        for name, member in list(self._members.items()):
            try:
                getattr(member, what)(*arguments)
            except Exception as error:
                del self._members[name]
                self._note(f"{given('log', name)}: {type(error).__name__}: {error}; it gets no more experiments")


def open_loggers(names: Sequence[str], folder: Path, note: Callable[[str], None]) -> Loggers:
    """The loggers of these names; a `RequestError` for one that is not installed, before any experiment runs."""
    members = {name: _MAKERS[name](folder) for name in dict.fromkeys(names)}
    return Loggers(members, note)


def _imported(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(f"{given('log', name)}: {package} is not installed here: pip install {package}") from error


def _settings(job: Job) -> dict[str, Any]:
    """Dotted keys with values that every logger takes."""
    flat = flatten(job.run_settings)
    return {key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in flat.items()}


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _totals(outcome: AttemptOutcome) -> dict[str, float]:
    """The figures of a whole run: metrics of its best epoch, rate, memory, seconds."""
    best = {f"best_{name}": value for name, value in (outcome.figures.get("best") or {}).items()}
    return _numbers({**best, **outcome.figures, "seconds": outcome.seconds})


class TensorBoardLogger:
    """A folder of event files for each experiment, under `tensorboard/` in the sweep's folder."""

    def __init__(self, folder: Path) -> None:
        _imported("tensorboard", "tensorboard", "tensorboard")
        self._writer = _imported("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._folder = folder / "tensorboard"

    def log(self, job: Job, outcome: AttemptOutcome) -> None:
        """Curves over epochs, and the settings with the figures that they led to."""
        with self._writer(str(self._folder / job.id)) as writer:
            for row in outcome.epochs:
                step = int(row.get("epoch", 0))
                for name, value in _numbers(row).items():
                    if name != "epoch":
                        writer.add_scalar(name, value, step)
            writer.add_hparams(_settings(job), _totals(outcome), run_name=".")

    def close(self) -> None:
        """Every file is closed already."""


class MlflowLogger:
    """One run for each experiment, in the experiment named after the sweep's folder, at `MLFLOW_TRACKING_URI`."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = _imported("mlflow", "mlflow", "mlflow")
        self._mlflow.set_experiment(folder.name or "sweep")

    def log(self, job: Job, outcome: AttemptOutcome) -> None:
        """Parameters, curves, figures and whether it failed."""
        with self._mlflow.start_run(run_name=job.id):
            self._mlflow.log_params(_settings(job))
            for row in outcome.epochs:
                step = int(row.get("epoch", 0))
                self._mlflow.log_metrics({k: v for k, v in _numbers(row).items() if k != "epoch"}, step=step)
            self._mlflow.log_metrics(_totals(outcome))
            self._mlflow.set_tags({"state": outcome.state, "failure": outcome.failure, "error": outcome.error[:500]})

    def close(self) -> None:
        """Every run is ended already."""


class WandbLogger:
    """One run for each experiment, grouped by the sweep's folder; where to is wandb's own settings' matter."""

    def __init__(self, folder: Path) -> None:
        self._wandb = _imported("wandb", "wandb", "wandb")
        self._folder = folder

    def log(self, job: Job, outcome: AttemptOutcome) -> None:
        """Configuration, curves, a summary, and an exit code where it failed."""
        run = self._wandb.init(
            name=job.id, group=self._folder.name, config=_settings(job), dir=str(self._folder), reinit=True
        )
        for row in outcome.epochs:
            run.log(_numbers(row))
        run.summary.update({**_totals(outcome), "state": outcome.state, "failure": outcome.failure})
        run.finish(exit_code=0 if outcome.state == "completed" else 1)

    def close(self) -> None:
        """Every run is finished already."""


_MAKERS: Mapping[str, Callable[[Path], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
