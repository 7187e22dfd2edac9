from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.monitor import live
from brim.monitor.live import LiveRun, both, read_runs, registered_runs_folder
from tests.monitor.sampling import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def left_by(folder: Path, **more: Any) -> dict[str, Any]:
    """What a run has left in the state directory; by default its process is this one."""
    document = {
        "schema": "brim.live/1", "pid": os.getpid(), "host": platform.node(), "folder": str(folder), "kind": "eval",
        "created": psutil.Process().create_time(), "started_at": 1.0, "updated_at": time.time(), "state": "running",
        **more,
    }  # fmt: skip
    registered_runs_folder().mkdir(parents=True, exist_ok=True)
    (registered_runs_folder() / f"{len(list(registered_runs_folder().iterdir()))}.json").write_text(
        json.dumps(document)
    )
    return document


def test_a_run_is_published_in_its_folder_and_in_the_state_directory_until_it_ends(folder: Path) -> None:
    with LiveRun(folder, "eval") as run:
        run.update(state="running", done=3, total=10, unit="samples")
        wait_until(lambda: bool(read_runs()))
        wait_until(lambda: (folder / "live.json").exists())
        own = json.loads((folder / "live.json").read_text())
        assert (own["schema"], own["pid"], own["kind"]) == ("brim.live/1", os.getpid(), "eval")
        assert own["folder"] == str(folder)
        assert len(list(registered_runs_folder().iterdir())) == 1
    assert list(folder.iterdir()) == []
    assert list(registered_runs_folder().iterdir()) == []


def test_later_figures_are_written_and_every_document_is_whole(folder: Path) -> None:
    with LiveRun(folder, "eval", interval_seconds=0.001) as run:
        for done in range(200):
            run.update(done=done, total=200)
            found = read_runs()
            assert all(set(one) >= {"done", "updated_at", "seconds_left"} for one in found)
        wait_until(lambda: [one["done"] for one in read_runs()] == [199])


def test_an_error_of_the_run_removes_its_files_too(folder: Path) -> None:
    def fail() -> None:
        with LiveRun(folder, "train"):
            wait_until(lambda: bool(read_runs()))
            raise ValueError("the run failed")

    with pytest.raises(ValueError, match="the run failed"):
        fail()
    assert read_runs() == []
    assert list(folder.iterdir()) == []


def test_of_runs_inside_one_another_the_outermost_is_published(folder: Path) -> None:
    inner = folder / "seed-1"
    inner.mkdir()
    with LiveRun(folder, "train"):
        with LiveRun(inner, "train"):
            wait_until(lambda: bool(read_runs()))
            assert not (inner / "live.json").exists()
        assert [run["folder"] for run in read_runs()] == [str(folder)]


def test_a_rank_that_is_not_the_first_publishes_nothing(folder: Path) -> None:
    with LiveRun(folder, "eval", publishes=False) as run:
        run.update(done=1)
        assert run._thread is None


def test_a_state_directory_that_cannot_be_written_does_not_harm_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with LiveRun(folder, "eval") as run:
        wait_until(lambda: run.error is not None)
        run.update(done=1)
    assert list(folder.iterdir()) == []


def test_a_folder_that_vanishes_ends_the_publishing_and_is_not_made_again(folder: Path) -> None:
    with LiveRun(folder, "eval", interval_seconds=0.001) as run:
        wait_until(lambda: bool(read_runs()))
        while folder.exists():
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            try:
                folder.rmdir()
            except OSError:
                continue
        wait_until(lambda: run.error is not None)
    assert not folder.exists()
    assert read_runs() == []


SCRIPT = """
import sys, time, pathlib
from brim.monitor.live import LiveRun
with LiveRun(pathlib.Path(sys.argv[1]), "train") as run:
    run.update(state="running", done=5, total=10)
    time.sleep(60)
"""


def test_a_run_that_was_killed_is_shown_as_such(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)])
    try:
        wait_until(lambda: [run["done"] for run in read_runs()] == [5])
        assert read_runs()[0]["state"] == "running"
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: read_runs()[0]["state"] == "killed")  # a zombie already
    finally:
        process.kill()
        process.wait()
    (run,) = read_runs()
    assert (run["state"], run["pid"], run["done"]) == ("killed", process.pid, 5)
    (found,) = read_runs(folder)
    assert found == run


def test_another_process_with_the_same_number_is_not_the_run(folder: Path) -> None:
    left_by(folder, created=psutil.Process().create_time() - 100)
    assert [run["state"] for run in read_runs()] == ["killed"]


def test_a_killed_run_is_dropped_with_its_folder_or_after_a_day(folder: Path, tmp_path: Path) -> None:
    dead = {"created": 1.0}
    left_by(tmp_path / "gone", **dead)
    left_by(folder, updated_at=time.time() - 25 * 3600, **dead)
    assert read_runs() == []
    assert list(registered_runs_folder().iterdir()) == []
    left_by(tmp_path / "gone")  # its process is there: it is shown
    assert [run["state"] for run in read_runs()] == ["running"]


def test_runs_of_another_machine_are_shown_by_their_folder_alone(folder: Path) -> None:
    document = left_by(folder, host="elsewhere", created=1.0)
    assert read_runs() == []
    (folder / "live.json").write_text(json.dumps(document))
    assert [run["state"] for run in read_runs(folder)] == ["running"]


def test_of_a_folder_the_runs_below_it_are_shown_too(folder: Path, tmp_path: Path) -> None:
    left_by(folder, started_at=2.0)
    left_by(folder / "experiments" / "a", started_at=3.0)
    left_by(tmp_path / "other")
    assert [run["folder"] for run in read_runs(folder)] == [str(folder), str(folder / "experiments" / "a")]
    assert len(read_runs()) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "brim.live/2"}', '{"schema": "brim.live/1"}'])
def test_anything_else_in_the_state_directory_is_left_alone(text: str) -> None:
    registered_runs_folder().mkdir(parents=True)
    stray = registered_runs_folder() / "stray.json"
    stray.write_text(text)
    assert read_runs() == []
    assert stray.exists()


def test_time_left_follows_from_what_was_done_since_the_first_reading() -> None:
    progress = live._Progress()
    fields = {"kind": "train", "unit": "samples", "samples_per_second": 1.0, "done": 40, "total": 100}
    assert progress.seconds_left(fields, 1000.0) is None  # 40 may be of an earlier start
    assert progress.seconds_left({**fields, "done": 60}, 1010.0) == pytest.approx(20.0)
    assert progress.seconds_left({**fields, "unit": "epochs", "done": 1, "total": 5}, 1020.0) is None
    assert progress.seconds_left({**fields, "total": None}, 1030.0) is None
    assert live._Progress().seconds_left({**fields, "kind": "eval", "samples_per_second": 30.0}, 0.0) == 2.0


class _Heard:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def begin(self, total: int, *, done: int) -> None:
        self.events.append(("begin", total, done))

    def note(self, line: str) -> None:
        self.events.append(("note", line))


def test_two_listeners_get_every_event() -> None:
    first, second = _Heard(), _Heard()
    pair = both(_Heard, first, second)
    pair.begin(3, done=1)
    pair.note("a line")
    assert first.events == second.events == [("begin", 3, 1), ("note", "a line")]
