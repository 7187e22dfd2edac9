"""Checkpoints that are written behind the next steps: the same files, in order, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.memory import host_copies
from brim.running.loader import Loader
from brim.storage.write_behind import WriteBehind
from brim.training import run_files
from brim.training.checkpoint import find_checkpoint, load_checkpoint
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

SAME = {"hp__batch_size": 8, "model__params": {"hidden": [16], "dropout": 0.4}}
SECONDS = 60.0  # many times what it takes


@pytest.fixture
def features(tmp_path: Path) -> Path:
    return write_features(tmp_path / "features.npz")


class Announces(Watcher):
    """Lets whoever writes wait for a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Condition()

    def step(self, record: StepRecord) -> None:
        with self.seen:
            super().step(record)
            self.seen.notify_all()

    def wait_for(self, step: int) -> bool:
        with self.seen:
            return self.seen.wait_for(lambda: bool(self.steps) and self.steps[-1].step >= step, SECONDS)


def saving(before: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the checkpoints as they are written; `before` is called with how many there were, and the step."""
    save, written = run_files.save_checkpoint, []

    def slow(folder: Path, *, step: int, **state: Any) -> Path:
        before(len(written), step)
        path = save(folder, step=step, **state)
        written.append(step)
        return path

    monkeypatch.setattr(run_files, "save_checkpoint", slow)
    return written


def test_steps_continue_while_a_slow_checkpoint_is_written_and_nothing_changes(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = settings_of(features, **SAME, training__checkpoint_every=3)
    run(nested, tmp_path / "plain")
    watcher, behind = Announces(), []

    def after_two_more(count: int, step: int) -> None:
        if count == 0:
            behind.append(watcher.wait_for(step + 2))  # would wait for ever if the steps waited for it

    written = saving(after_two_more, monkeypatch)
    run(nested, tmp_path / "slow", listener=watcher)
    assert behind == [True]
    assert written == sorted(written)
    assert losses(tmp_path / "slow") == losses(tmp_path / "plain")
    for name in ("last", "best"):
        assert largest_difference(weights(tmp_path / "slow", name), weights(tmp_path / "plain", name)) == 0
    kept = [find_checkpoint(tmp_path / name) for name in ("slow", "plain")]
    states = [json.loads((one / "state.json").read_text()) for one in kept if one is not None]
    assert [state["step"] for state in states] == [written[-1]] * 2
    assert states[0]["generators"] == states[1]["generators"]


def test_a_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = settings_of(features, **SAME, training__checkpoint_every=2)
    shapes = {name: tuple(tensor.shape) for name, tensor in _model_at(nested, tmp_path / "until", 2).items()}
    watcher, found = Announces(), {}

    def late(count: int, step: int) -> None:
        if count == 0:
            assert watcher.wait_for(step + 2)

    save = run_files.save_checkpoint

    def kept(folder: Path, *, step: int, **state: Any) -> Path:
        late(len(found), step)
        path = save(folder, step=step, **state)
        found.setdefault(step, load_checkpoint(path, shapes=shapes, rank=0))
        return path

    monkeypatch.setattr(run_files, "save_checkpoint", kept)
    run(nested, tmp_path / "run", listener=watcher)
    assert largest_difference(found[2].weights, _model_at(nested, tmp_path / "again", 2)) == 0
    assert found[2].state["progress"]["step"] == 2


def _model_at(nested: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """The weights of a checkpoint after so many steps, from a run that ended there."""
    from safetensors.torch import load_file

    if not folder.exists():
        run({**nested, "hp": {**nested["hp"], "max_steps": steps}}, folder)
    path = find_checkpoint(folder)
    assert path is not None
    return load_file(path / "model.safetensors")


def test_a_full_disk_ends_the_run_at_the_next_step_with_the_checkpoint_before_it(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = settings_of(features, **SAME, training__checkpoint_every=2)
    watcher = Announces()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def second_fails(count: int, step: int) -> None:
        if count == 1:
            monkeypatch.setattr("brim.training.checkpoint._sync_folder", full)

    written = saving(second_fails, monkeypatch)
    with pytest.raises(RequestError, match=r"No space left.*checkpoint-00000002 is whole.*resume="):
        run(nested, tmp_path / "run", listener=watcher)
    assert written == [2]
    assert [path.name for path in (tmp_path / "run").glob(".*partial")] == []
    monkeypatch.undo()
    run(nested, tmp_path / "run", resume=True)
    run(nested, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_where_steps_cannot_be_written_the_file_is_named(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(run_files, "read_steps", lambda path: [])  # the device can be read without end
    with pytest.raises(RequestError, match=r"cannot write .*steps\.jsonl: No space left"):
        run(settings_of(features), tmp_path / "run")


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_its_error(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = settings_of(features, **SAME, hp__epochs=1)

    def fails(count: int, step: int) -> None:
        raise RequestError("cannot write: No space left on device")

    saving(fails, monkeypatch)
    with pytest.raises(RequestError, match="No space left"):
        run(nested, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_after_ctrl_c_the_checkpoint_is_whole(features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = settings_of(features, **SAME)
    written = saving(lambda count, step: None, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(nested, tmp_path / "run", listener=StopsAt(2))
    path = find_checkpoint(tmp_path / "run")
    assert path is not None
    assert json.loads((path / "state.json").read_text())["step"] == written[-1]


def test_where_a_copy_does_not_fit_on_the_host_checkpoints_are_written_at_once(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = settings_of(features, **SAME, training__checkpoint_every=3)
    run(nested, tmp_path / "behind")
    monkeypatch.setattr(host_copies, "available_host_bytes", lambda: 0)
    monkeypatch.setattr(WriteBehind, "start", lambda self, job: pytest.fail("there is no copy to write from"))
    run(nested, tmp_path / "at-once")
    assert losses(tmp_path / "at-once") == losses(tmp_path / "behind")
    for name in ("last", "best"):
        assert largest_difference(weights(tmp_path / "at-once", name), weights(tmp_path / "behind", name)) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_from_the_one_before(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, **SAME, training__checkpoint_every=2)
    run(nested, tmp_path / "whole")
    folder = tmp_path / "killed"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _die_while_writing(nested, folder)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == 2
    assert list(folder.glob(".checkpoint-*.partial"))  # a part of the second one
    assert max(json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()) > 4
    run(nested, folder, resume=True)
    assert losses(folder) == losses(tmp_path / "whole")
    assert largest_difference(weights(folder), weights(tmp_path / "whole")) == 0


def _die_while_writing(nested: dict[str, Any], folder: Path) -> None:
    """Killed after a step that follows the second checkpoint, whose weights alone are written by then."""
    from brim.training import checkpoint

    watcher, sync, made = Announces(), checkpoint._save_tensors, []

    def save(path: Path, tensors: Any) -> None:
        sync(path, tensors)
        made.append(path.name)
        if made.count("model.safetensors") == 2:
            watcher.wait_for(5)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._save_tensors = save
    run(nested, folder, listener=watcher)


def test_one_set_of_processes_serves_all_epochs_and_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def rows(count: int = 24):\n"
        "    held = [(torch.full((6,), float(place % 3)), place % 3) for place in range(count)]\n"
        "    return lambda split: held\n"
        "def net():\n    return nn.Linear(6, 3)\n",
        encoding="utf-8",
    )
    nested = settings_of(tmp_path, model__params={}, hp__batch_size=8, data__num_workers=1)
    nested["model"]["type"] = f"py:{tmp_path / 'own.py'}:net"
    nested["data"] = {"type": f"py:{tmp_path / 'own.py'}:rows", "num_workers": 1}
    nested["task"] = "classify"
    starts, start = [], Loader._start

    def counted(self: Loader, workers: int) -> Any:
        starts.append(workers)
        return start(self, workers)

    monkeypatch.setattr(Loader, "_start", counted)
    result = run(nested, tmp_path / "run")
    assert [row["val_loss"] is not None for row in result.epochs] == [True] * 3
    assert starts == [1]


def test_the_record_has_the_devices_waiting_by_cause(features: Path, tmp_path: Path) -> None:
    run(settings_of(features, **SAME), tmp_path / "run")
    summary = record_of(tmp_path / "run")["summary"]
    assert set(summary["gpu_wait_causes"]) == {"loading", "validation", "checkpoint", "search", "other"}
    assert all(part >= 0 for part in summary["gpu_wait_causes"].values())
    assert 0 < summary["gpu_wait_fraction"] <= 1
    assert summary["gpu_wait_fraction"] == pytest.approx(sum(summary["gpu_wait_causes"].values()))
    assert summary["gpu_wait_causes"]["checkpoint"] > 0
