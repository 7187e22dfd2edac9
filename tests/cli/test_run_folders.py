"""What every command that writes a run asks of `-o` before it reads a model: writable, free, and no other run."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

Brim = Callable[..., Any]

# Each names a model or data that is not there: whoever looks for those first complains about them instead.
COMMANDS = {
    "eval": ["eval", "-m", "./no-model", "-d", "no-data.jsonl"],
    "profile": ["profile", "-m", "./no-model", "-d", "no-data.jsonl", "--knob", "size=8"],
    "train": ["train", "config.yaml"],
    "seeds": ["train", "config.yaml", "--seeds", "2"],
    "dpo": ["train", "dpo", "--id", "no-in.csv", "--ood", "no-out.csv"],
    "compare eval": ["eval", "-m", "./no-model", "-d", "no-data.jsonl", "--compare-batch", "1,2"],
    "compare train": ["train", "config.yaml", "--compare-batch", "1,2"],
    "compare ood": ["ood", "--id", "no-in.csv", "--ood", "no-out.csv", "--compare-batch", "1,2"],
    "explain": ["profile", "-m", "./no-model", "-d", "no-data.jsonl", "--knob", "size=8", "--explain-speed"],
    "encode": ["encode", "-d", "no-data.csv"],
    "sweep": ["sweep", "grid.yaml"],
}
CONFIG = "model: {type: 'py:no-nets.py:net'}\ndata: {root: no-rows.npz}\nhp: {epochs: 1}\ntraining: {device: cpu}\n"
# What an earlier run of each command has left: a file, and what is in it.
LEFT = {
    "eval": {"samples.jsonl": '{"id": "a"}\n', "journal.json": '{"schema": "brim.journal/1", "fingerprint": "f"}'},
    "profile": {"values/size-8/point.json": "{}"},
    "train": {"run.json": '{"schema": "brim.run/1", "kind": "train", "request": {"command": "train"}}'},
    "seeds": {"runs.json": "{}"},
    "dpo": {"cells.jsonl": '{"data": "a"}\n'},
    "sweep": {"journal.jsonl": '{"schema": "brim.journal/1"}\n{"event": "started"}\n'},
}

every_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    Path("grid.yaml").write_text(f"{CONFIG}grid_search: {{grid: {{hp.learning_rate: [0.1, 0.2]}}}}\n")


def output_of(command: str, folder: str) -> list[str]:
    """`-o`; `brim encode` writes one file."""
    return ["-o", f"{folder}/f.safetensors" if command == "encode" else folder]


def refused(brim: Brim, command: str, output: list[str], *more: str) -> str:
    """The one message of a command that is refused."""
    result = brim(*COMMANDS[command], *output, *more)
    assert result.code == 2, result.err
    assert result.out == ""
    message = " ".join(result.err.split())
    assert message.startswith("brim: "), "one message, and nothing before it"
    return message


@every_command
def test_a_folder_that_another_process_writes_is_refused(brim: Brim, command: str) -> None:
    Path("run").mkdir()
    lock = Path("run/.f.safetensors.lock" if command == "encode" else "run/.lock")
    record = {"schema": "brim.lock/1", "pid": 4321, "host": "elsewhere", "since": "2025-01-01T10:00:00+00:00"}
    lock.write_text(json.dumps(record))
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        message = refused(brim, command, output_of(command, "run"))
    for part in ("run", "process 4321 on elsewhere since 2025-01-01T10:00:00+00:00", "wait until it ends"):
        assert part in message
    assert json.loads(lock.read_text()) == record


@every_command
@pytest.mark.parametrize("folder", ["file/below", "/proc/brim", "x" * 300])
def test_a_folder_that_cannot_be_written_is_refused(brim: Brim, command: str, folder: str) -> None:
    Path("file").write_text("")
    message = refused(brim, command, output_of(command, folder))
    assert message.startswith("brim: --output ")
    assert "choose another folder" in message
    assert "finished" not in message


@pytest.mark.parametrize("command", LEFT)
def test_a_folder_that_holds_a_run_is_refused_and_resume_named(brim: Brim, command: str) -> None:
    for name, content in LEFT[command].items():
        Path("run", name).parent.mkdir(parents=True, exist_ok=True)
        Path("run", name).write_text(content)
    assert "continue it with --resume" in refused(brim, command, ["-o", "run"])
    assert {name: Path("run", name).read_text() for name in LEFT[command]} == LEFT[command]
    assert not Path("run/.lock").exists()


def test_a_part_of_an_encoded_file_is_refused_and_resume_named(brim: Brim) -> None:
    Path("f.safetensors.partial.jsonl").write_text('{"schema": "brim.journal/1"}\n{"item": 0}\n')
    assert "continue with --resume" in refused(brim, "encode", ["-o", "f.safetensors"])


@pytest.mark.parametrize("command", LEFT)
def test_a_run_of_another_command_is_not_overwritten(brim: Brim, command: str) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_text('{"schema": "brim.run/1", "kind": "find", "request": {"command": "find"}}')
    for more in ([], ["--resume"]):
        assert "a run of brim find" in refused(brim, command, ["-o", "run"], *more)


@every_command
def test_a_wrong_request_leaves_no_folder_behind(brim: Brim, command: str) -> None:
    Path("grid.yaml").unlink()
    assert brim(*COMMANDS[command], *output_of(command, "new/run")).code == 2
    assert not Path("new").exists()


SLOW = """
import time

def shout():
    def answer(samples):
        time.sleep(0.05)
        with open("seen.txt", "a") as file:
            file.writelines(sample.id + "\\n" for sample in samples)
        return [sample.prompt.upper() for sample in samples]
    return answer
"""


def test_a_second_evaluation_is_refused_and_a_killed_one_is_not_in_the_way(brim: Brim) -> None:
    Path("models.py").write_text(SLOW)
    lines = [{"id": f"q{number}", "question": "a", "answer": "A"} for number in range(200)]
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["eval", "-m", "py:models.py:shout", "-d", "data.jsonl", "-o", "run", "-b", "2", "--device", "cpu"]
    first = subprocess.Popen([sys.executable, "-m", "brim", *asked], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        finished = Path("run/samples.jsonl")
        while not (finished.exists() and finished.stat().st_size):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for more in ([], ["--resume"]):
            result = brim(*asked, *more)
            assert result.code == 2
            assert f"in use by process {first.pid} on " in " ".join(result.err.split())
        record = json.loads(Path("run/.lock").read_text())
        assert record["command"] == ["brim", *asked]
    finally:
        first.kill()
        first.wait()
    kept = Path("run/samples.jsonl").read_text().splitlines()
    assert 0 < len(kept) < 200
    assert brim(*asked[:-4], "-b", "50", "--device", "cpu", "--resume").code == 0
    seen = Counter(Path("seen.txt").read_text().split())
    assert len(seen) == 200
    assert sum(seen.values()) <= 204, "at most the batches that were under way are computed again"
    assert not Path("run/.lock").exists()


def test_a_second_training_is_refused(brim: Brim) -> None:
    """As `brim train --resume` started twice: the first is this test, which has the folder."""
    rows = numpy.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    numpy.savez("rows.npz", features=rows, labels=(rows[:, 0] > 0).astype(int))
    Path("config.yaml").write_text(
        "model: {type: mlp}\ndata: {root: rows.npz}\nhp: {epochs: 1, batch_size: 16}\ntraining: {device: cpu}\n"
    )
    assert brim("train", "config.yaml", "-o", "run").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    with Path("run/.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = brim("train", "config.yaml", "hp.epochs=2", "-o", "run", "--resume")
        assert result.code == 2
        assert "in use by another process" in result.err
    Path("run/.lock").unlink()
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
