"""One process at a time in a run folder: who has it, who is refused, and what a kill leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.errors import LostError, RequestError
from brim.storage.run_folder import keep_command_line
from brim.storage.run_lock import LOCK_SCHEMA, locked_file, locked_folder, read_lock

# Takes a folder, forks a child that keeps all it inherits, and waits to be killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from brim.storage.run_lock import locked_folder

with locked_folder(Path(sys.argv[1]), command="eval"):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has `tmp_path / "run"`; its first line of output is the child that it has forked."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_another_process_is_refused_with_who_has_the_folder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    folder = tmp_path / "run"
    record = read_lock(folder)
    assert record is not None
    assert (record["schema"], record["pid"], record["host"]) == (LOCK_SCHEMA, holder.pid, platform.node())
    try:
        with pytest.raises(RequestError) as refused, locked_folder(folder, command="eval"):
            pass
        for part in (str(folder), str(holder.pid), platform.node(), record["since"]):
            assert part in str(refused.value)
        assert "\n" not in str(refused.value)
        assert read_lock(folder) == record, "the record of the holder survives a refused process"
        with pytest.raises(LostError), locked_folder(folder, command="eval", wait_seconds=0.1):
            pass
        # A kill ends the lock, though the forked child lives and the record is still there.
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        assert read_lock(folder) == record
        with locked_folder(folder, command="eval"):
            now = read_lock(folder)
            assert now is not None
            assert now["pid"] == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_lock_record_has_the_command_and_is_removed_with_the_lock(tmp_path: Path) -> None:
    keep_command_line(["brim", "eval", "-o", "run"])
    try:
        with locked_folder(tmp_path, command="eval") as folder:
            record = read_lock(folder)
    finally:
        keep_command_line([])
    assert record is not None
    assert record["command"] == ["brim", "eval", "-o", "run"]
    assert list(tmp_path.iterdir()) == []


def test_the_thread_that_has_a_folder_may_enter_it_again_and_no_other(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with locked_folder(tmp_path, command="eval"):
                pass
        except RequestError as error:
            refused.append(str(error))

    with locked_folder(tmp_path, command="eval"):
        with locked_folder(tmp_path / ".." / tmp_path.name, command="train"):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1
    other()
    assert len(refused) == 1


def test_an_unused_new_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine/new/er", "mine"):
        with locked_folder(tmp_path / name, command="eval"):
            assert (tmp_path / name).is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_run_that_changes_its_working_folder_gives_the_lock_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    with locked_folder(Path("run"), command="eval"):
        monkeypatch.chdir("elsewhere")
    assert not (tmp_path / "run").exists()


def test_two_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Path] = []

    def other() -> None:
        with locked_folder(None, command="eval") as folder:
            found.append(folder)

    with locked_folder(None, command="eval") as first:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1
    assert found[0] != first


def test_outputs_in_one_folder_have_locks_of_their_own(tmp_path: Path) -> None:
    with locked_file(tmp_path / "a.safetensors"), locked_file(tmp_path / "b.safetensors"):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".a.safetensors.lock", ".b.safetensors.lock"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_uses_the_record_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    notes: list[str] = []
    with locked_folder(tmp_path, command="eval", note=notes.append):
        assert len(notes) == 1
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    record = {"schema": LOCK_SCHEMA, "host": platform.node(), "since": "2025-01-01T00:00:00+00:00", "command": []}
    (tmp_path / ".lock").write_text(json.dumps({**record, "pid": int(gone.stdout)}))
    with locked_folder(tmp_path, command="eval"):
        pass
    (tmp_path / ".lock").write_text(json.dumps({**record, "pid": os.getppid()}))
    with pytest.raises(RequestError, match=str(os.getppid())), locked_folder(tmp_path, command="eval"):
        pass


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": 1}'])
def test_a_lock_file_with_no_record_is_no_one_s(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lock").write_bytes(content)
    assert read_lock(tmp_path) is None
    with (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="in use by another process"), locked_folder(tmp_path, command="eval"):
            pass
    with locked_folder(tmp_path, command="eval"):
        pass


def test_a_dangling_lock_file_link_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(RequestError, match="cannot be written"), locked_folder(tmp_path, command="eval"):
        pass


@pytest.mark.parametrize("name", ["x" * 300, "file/below", "file", "/proc/brim/run"])
def test_a_folder_that_cannot_be_written_is_a_wrong_request(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="output="), locked_folder(tmp_path / name, command="eval"):
        pass
