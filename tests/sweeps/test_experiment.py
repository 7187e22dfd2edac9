"""An experiment's process from the inside: outcomes, the lock, what is complete already, a real run and its retry."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from brim.errors import DoesNotFitError, LostError, RequestError
from brim.running.child_main import INTERRUPTED
from brim.sweeps import experiment
from brim.sweeps.experiment import run_job, train_run
from brim.sweeps.job import AttemptOutcome, Job, read_outcome, write_outcome
from brim.sweeps.run import next_attempt
from tests.sweeps.sweep_runs import failed


def a_job(folder: Path, **settings: Any) -> Job:
    return Job(id="x", settings={"model": {"type": "mlp"}, **settings}, folder=str(folder))


def raising(error: BaseException) -> Callable[..., Any]:
    def train(job: Job, send: Any) -> Any:
        raise error

    return train


def send_nowhere(event: Any) -> None:
    del event


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DoesNotFitError("nothing fits"), "out_of_memory"),
        (MemoryError("out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RequestError("data.root: no such file"), "request"),
        (LostError("the device is gone"), "lost"),
        (KeyError("labels"), "error"),
    ],
)
def test_every_error_becomes_an_outcome_of_its_kind(error: Exception, failure: str, tmp_path: Path) -> None:
    assert run_job(a_job(tmp_path / "x"), send_nowhere, raising(error)) == 1
    outcome = read_outcome(tmp_path / "x", id="x")
    assert outcome is not None
    assert (outcome.state, outcome.failure) == ("failed", failure)


def test_an_interrupted_experiment_leaves_no_outcome(tmp_path: Path) -> None:
    assert run_job(a_job(tmp_path / "x"), send_nowhere, raising(KeyboardInterrupt())) == INTERRUPTED
    assert read_outcome(tmp_path / "x", id="x") is None


def test_complete_work_is_kept_and_another_runs_outcome_is_ignored(tmp_path: Path) -> None:
    write_outcome(tmp_path / "x", AttemptOutcome(id="x", attempt=1, state="completed", figures={"steps": 7}))
    assert run_job(a_job(tmp_path / "x"), send_nowhere, raising(AssertionError("it ran"))) == 0
    kept = read_outcome(tmp_path / "x", id="x")
    assert kept is not None
    assert kept.figures == {"steps": 7}
    assert read_outcome(tmp_path / "x", id="y") is None


def test_two_processes_of_one_experiment_do_not_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "LOCK_SECONDS", 0.2)
    (tmp_path / "x").mkdir()
    with (tmp_path / "x" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LostError, match="in use by"):
            run_job(a_job(tmp_path / "x"), send_nowhere, raising(AssertionError("it ran")))
    assert read_outcome(tmp_path / "x", id="x") is None


def test_a_real_run_gives_figures_epochs_and_how_its_size_was_chosen(tmp_path: Path) -> None:
    rows = numpy.random.default_rng(0).standard_normal((48, 4)).astype("float32")
    numpy.savez(tmp_path / "rows.npz", features=rows, labels=rows[:, :3].argmax(axis=1))
    job = a_job(
        tmp_path / "x",
        data={"root": str(tmp_path / "rows.npz"), "num_workers": 0},
        hp={"epochs": 2, "batch_size": 16},
        training={"device": "cpu", "lr_scale": "linear"},
    )
    job = dataclasses.replace(job, use_cache=False, changes={"hp.effective_batch": 16})
    events: list[Any] = []
    figures, epochs, reason = train_run(job, events.append)
    assert (figures["batch_size_used"], figures["effective_batch_size"], reason) == (16, 16, "as asked")
    assert set(figures["best"]) >= {"train_loss", "val_loss", "top1"}
    assert [row["epoch"] for row in epochs] == [0, 1]
    assert [event["event"] for event in events if event["event"] in ("opened", "epoch")] == ["opened", "epoch", "epoch"]
    # A retry at half goes on from the checkpoint, in smaller micro-batches of the same steps.
    retried = next_attempt(job, failed(job, "out_of_memory"), planned=None, effective_batch=16)
    assert retried is not None
    again = dataclasses.replace(retried, changes={**retried.changes, "hp.epochs": 3})
    figures, epochs, reason = train_run(again, events.append)
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    assert (figures["effective_batch_size"], reason) == (16, "16 ran out of memory: retried at 8")
