"""A run that is stopped, at any step and in any way, ends as the one that was not."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.sizing.live import LiveSizer
from brim.sizing.sizer import Trial
from brim.training.listener import StepRecord
from tests.training.training_runs import (
    StopsAt,
    Watcher,
    largest_difference,
    losses,
    record_of,
    run,
    settings_of,
    weights,
    write_features,
)

DROPOUT: dict[str, Any] = {
    "model__params": {"hidden": [16], "dropout": 0.4},
    "hp__batch_size": 8,
    "training__eval_batch_size": 4,
}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("data") / "features.npz")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler__name": "cosine", "scheduler__warmup_steps": 3},
        {"optimizer__name": "sgd", "training__gradient_clip": 0.5, "scheduler__name": "onecycle"},
        {"training__dtype": "bfloat16"},
        {"training__dtype": "float16"},
        {"hp__effective_batch": "auto", "hp__batch_size": 8},
    ],
    ids=["plain", "cosine", "sgd", "bfloat16", "float16", "growing"],
)
@pytest.mark.parametrize("stop", [1, 9])
def test_a_run_that_was_interrupted_has_the_losses_of_one_that_was_not(
    features: Path, tmp_path: Path, changes: dict[str, Any], stop: int
) -> None:
    nested = settings_of(features, **{"training__dtype": "float32", **DROPOUT, **changes})
    run(nested, tmp_path / "whole")
    watcher = StopsAt(stop)
    with pytest.raises(KeyboardInterrupt):
        run(nested, tmp_path / "parts", listener=watcher)
    assert f"resume=True, output='{tmp_path / 'parts'}'" in watcher.notes[-1]
    assert stop <= len(losses(tmp_path / "parts")) < len(losses(tmp_path / "whole"))
    run(nested, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert largest_difference(weights(tmp_path / "parts"), weights(tmp_path / "whole")) == 0
    one, other = record_of(tmp_path / "parts")["summary"], record_of(tmp_path / "whole")["summary"]
    for field in ("metrics", "steps", "samples", "best_epoch", "effective_batches"):
        assert one[field] == other[field]


def test_an_interrupt_during_validation_is_followed_by_the_validation(features: Path, tmp_path: Path) -> None:
    class InValidation(Watcher):
        def validating(self, epoch: int) -> None:
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    nested = settings_of(features, **DROPOUT)
    run(nested, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(nested, tmp_path / "parts", listener=InValidation())
    state = json.loads(next((tmp_path / "parts").glob("checkpoint-*/state.json")).read_text())
    assert state["progress"]["epoch"] == 1  # the second is not over before it is validated
    run(nested, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert (tmp_path / "parts" / "epochs.csv").read_text().count("\n") == 4


def epochs_without_times(folder: Path) -> list[dict[str, str]]:
    with (folder / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


@pytest.mark.parametrize("where", ["step", "validation"])
def test_a_resumed_run_validates_in_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Every batch seems to take one second, so that the sizes found do not depend on the clock."""
    sizes: list[int] = []

    class OneSecond(LiveSizer):
        def record(self, trial: Trial) -> None:
            sizes.append(trial.size)
            super().record(dataclasses.replace(trial, seconds=1.0))

    class InFirstValidation(Watcher):
        def validating(self, epoch: int) -> None:
            if epoch == 0:
                os.kill(os.getpid(), signal.SIGINT)

    file = write_features(tmp_path / "features.npz", count=160)
    nested = settings_of(file, **{**DROPOUT, "training__eval_batch_size": "auto"})
    monkeypatch.setattr("brim.sizing.priors.LiveSizer", OneSecond)
    run(nested, tmp_path / "whole")
    whole = list(sizes)
    assert len(set(whole)) > 1  # the first validation finds the size that the others have
    sizes.clear()
    with pytest.raises(KeyboardInterrupt):
        run(nested, tmp_path / "parts", listener=StopsAt(10) if where == "step" else InFirstValidation())
    if where == "validation":
        sizes.clear()
    run(nested, tmp_path / "parts", resume=True)
    assert sizes == whole
    assert epochs_without_times(tmp_path / "parts") == epochs_without_times(tmp_path / "whole")


def test_a_checkpoint_without_the_sizes_of_validation_can_be_resumed(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, **DROPOUT)
    with pytest.raises(KeyboardInterrupt):
        run(nested, tmp_path / "run", listener=StopsAt(9))
    file = next((tmp_path / "run").glob("checkpoint-*/state.json"))
    state = json.loads(file.read_text())
    del state["own"][0]["validation"]
    file.write_text(json.dumps(state))
    run(nested, tmp_path / "run", resume=True)
    assert len(epochs_without_times(tmp_path / "run")) == 3


def killed_at(nested: dict[str, Any], folder: Path, step: int, **options: Any) -> None:
    """Run in a process of its own that is killed without warning once it has made so many steps."""

    class Kills(Watcher):
        def step(self, record: StepRecord) -> None:
            if record.step >= step:
                os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run(nested, folder, listener=Kills(), **options)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_repeatedly_killed_run_has_the_losses_of_an_unbroken_one(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, **DROPOUT, training__checkpoint_every=4)
    run(nested, tmp_path / "whole")
    folder = tmp_path / "parts"
    killed_at(nested, folder, 2)  # before there is a checkpoint
    for step in (3, 7, 8, 15):
        killed_at(nested, folder, step, resume=True)
    run(nested, folder, resume=True)
    assert losses(folder) == losses(tmp_path / "whole")
    assert largest_difference(weights(folder), weights(tmp_path / "whole")) == 0
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))  # none lost, none twice


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sizes_are_reused_after_a_checkpoint(features: Path, tmp_path: Path) -> None:
    """-b auto: what fits best depends on the clock, so the steps that a killed run had made are cut as they were."""
    nested = settings_of(features, model__params={"hidden": [16], "dropout": 0.4}, training__checkpoint_every=2)
    folder = tmp_path / "killed"
    killed_at(nested, folder, 5)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    run(nested, folder, resume=True)
    again = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    made = len(lines)
    assert made >= 5
    assert [line["micro_batches"] for line in again[:made]] == [line["micro_batches"] for line in lines]
    assert [line["loss"] for line in again[:made]] == [line["loss"] for line in lines]


def test_a_folder_with_a_run_in_it_is_not_written_over(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features)
    run(nested, tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_text()
    with pytest.raises(RequestError, match="it holds a run; continue it with resume="):
        run(nested, tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_text() == before


def test_resuming_where_there_is_no_run_is_refused(features: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no run in"):
        run(settings_of(features), tmp_path / "nothing", resume=True)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model__params": {"hidden": [8]}}, "model"),
        ({"hp__learning_rate": 0.5}, "settings"),
        ({"data__val_fraction": 0.3}, "data"),
        ({"hp__effective_batch": 32}, "batch"),
        ({"hp__base_batch": 4, "training__lr_scale": "linear"}, "batch"),
    ],
)
def test_resuming_another_run_is_refused_and_nothing_is_lost(
    features: Path, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    nested = settings_of(features)
    run(nested, tmp_path / "run")
    kept = losses(tmp_path / "run")
    with pytest.raises(RequestError, match=f"another .*{word}"):
        run(settings_of(features, **changes), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == kept
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_a_run_resumes_with_another_micro_batch_and_the_same_effective_one(features: Path, tmp_path: Path) -> None:
    """Asked for in another way, it is the same batch; how it is cut changes nothing but the last digits."""
    nested = settings_of(features, hp__epochs=1, hp__batch_size=16)
    del nested["hp"]["effective_batch"]
    run(nested, tmp_path / "run")
    again = settings_of(features, hp__epochs=2, hp__batch_size=4, hp__effective_batch=16)
    result = run(again, tmp_path / "run", resume=True)
    assert result.summary["epochs"] == 2
    run(settings_of(features, hp__epochs=2), tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


def test_a_run_that_is_over_can_be_given_more_epochs(features: Path, tmp_path: Path) -> None:
    run(settings_of(features, hp__epochs=2, hp__batch_size=16), tmp_path / "run")
    result = run(settings_of(features, hp__epochs=3, hp__batch_size=16), tmp_path / "run", resume=True)
    run(settings_of(features, hp__epochs=3, hp__batch_size=16), tmp_path / "whole")
    assert result.summary["epochs"] == 3
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_an_epoch_that_max_steps_cut_short_is_noted_when_the_run_continues(features: Path, tmp_path: Path) -> None:
    first = settings_of(features, hp__batch_size=16, hp__epochs=3, hp__max_steps=4)
    run(first, tmp_path / "run")
    over = run(first, tmp_path / "run", resume=True)
    assert not any("left" in note for note in over.notes)
    watcher = Watcher()
    options = settings_of(features, hp__batch_size=16, hp__epochs=3)
    more = run(options, tmp_path / "run", resume=True, listener=watcher)
    assert watcher.facts is not None
    left = 3 * watcher.facts.train_samples - more.summary["samples"]
    assert left > 0
    assert any(f"{left} samples left, which are not made up for" in note for note in more.notes)


def test_a_run_that_stopped_early_continues_with_more_patience(features: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"hp__batch_size": 16, "hp__epochs": 6, "training__early_stopping_min_delta": 100.0}
    stopped = run(settings_of(features, **options, training__early_stopping=1), tmp_path / "run")
    assert (stopped.summary["epochs"], stopped.summary["stopped_early"]) == (2, True)
    again = run(settings_of(features, **options, training__early_stopping=1), tmp_path / "run", resume=True)
    assert (again.summary["epochs"], again.summary["stopped_early"]) == (2, True)
    longer = run(settings_of(features, **options, training__early_stopping=3), tmp_path / "run", resume=True)
    assert (longer.summary["epochs"], longer.summary["stopped_early"]) == (4, True)
    whole = run(settings_of(features, **options), tmp_path / "run", resume=True)
    assert (whole.summary["epochs"], whole.summary["stopped_early"]) == (6, False)


def test_the_best_epoch_by_one_figure_is_not_compared_by_another(features: Path, tmp_path: Path) -> None:
    run(settings_of(features, hp__epochs=1), tmp_path / "run")
    with pytest.raises(RequestError, match="best epoch so far is that by top1, and cannot be compared by loss"):
        run(settings_of(features, hp__epochs=2, training__monitor="loss"), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "pointer", ["{", '{"schema": "brim.checkpoint/9", "folder": "x"}', '{"schema": "brim.checkpoint/1"}']
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_whose_checkpoint_cannot_be_used_is_not_begun_again(
    features: Path, tmp_path: Path, pointer: str, resume: bool
) -> None:
    run(settings_of(features, hp__max_steps=2), tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()  # as a killed run leaves it
    (tmp_path / "run" / "checkpoint.json").write_text(pointer)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=r"checkpoint\.json: it names no checkpoint that can be read here"):
        run(settings_of(features), tmp_path / "run", resume=resume)
    assert sorted(tmp_path.rglob("*")) == files
    assert len(losses(tmp_path / "run")) == 2
