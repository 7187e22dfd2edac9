"""Loggers: each gets every experiment once, with all its epochs; one that fails is left out."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from brim.sweeps.loggers import open_loggers

from brim.errors import RequestError
from brim.sweeps.job import Job
from tests.sweeps.sweep_runs import done, failed

JOB = Job(id="r3d_18-b8", settings={"model": {"type": "r3d_18"}, "hp": {"batch_size": 8}}, folder="f")


@pytest.mark.parametrize(("name", "module"), [("mlflow", "mlflow"), ("wandb", "wandb"), ("tensorboard", "tensorboard")])
def test_a_logger_that_is_not_installed_is_refused_before_anything_runs(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RequestError, match=f"log='{name}': {name} is not installed here: pip install {name}"):
        open_loggers([name], tmp_path, print)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_a_folder_of_curves_for_each_experiment(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = open_loggers(["tensorboard"], tmp_path, print)
    loggers.log(JOB, done(JOB))
    loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / JOB.id))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("train_loss")] == [(0, 1.0), (1, 0.5)]


class FakeMlflow(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args or kwargs))

    def start_run(self, run_name: str) -> Any:
        import contextlib

        self.calls.append(("start_run", run_name))
        return contextlib.nullcontext()


def test_mlflow_gets_a_run_with_parameters_curves_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    open_loggers(["mlflow"], tmp_path / "sweep-1", print).log(JOB, done(JOB))
    assert [name for name, _ in fake.calls] == [
        "set_experiment", "start_run", "log_params", "log_metrics", "log_metrics", "log_metrics", "set_tags",
    ]  # fmt: skip
    assert fake.calls[0][1] == ("sweep-1",)
    assert fake.calls[2][1] == ({"model.type": "r3d_18", "hp.batch_size": 8},)
    assert fake.calls[-1][1][0]["state"] == "completed"


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.code: int | None = None

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_wandb_gets_a_run_that_has_failed_where_the_experiment_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: runs.append(FakeRun()) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers = open_loggers(["wandb"], tmp_path, print)
    loggers.log(JOB, done(JOB))
    loggers.log(JOB, failed(JOB))
    assert [run.code for run in runs] == [0, 1]
    assert [row["train_loss"] for row in runs[0].rows] == [1.0, 0.5]
    assert runs[1].summary["failure"] == "error"


def test_a_logger_that_fails_is_noted_once_and_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("wandb")
    calls: list[int] = []

    def init(**settings: Any) -> None:
        calls.append(1)
        raise OSError("no network")

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    notes: list[str] = []
    loggers = open_loggers(["wandb"], tmp_path, notes.append)
    loggers.log(JOB, done(JOB))
    loggers.log(JOB, done(JOB))
    assert len(calls) == 1
    assert notes == ["log='wandb': OSError: no network; it gets no more experiments"]
