"""Another process takes most of the card for a few seconds and gives it back: nothing is lost, and the size is back."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from brim.cli.main import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

LONGEST_SECONDS = 60.0  # that one side waits for the other
BATCH = 256
STEPS, WINDOW = 14, 512

# Waits for the file `go`, takes all of the card but so many bytes, writes `held`; waits for the file `leave`, gives the
# card back, writes `released`.
NEIGHBOUR = """
import sys, time
from pathlib import Path
import torch

folder, left, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def wait_for(name):
    deadline = time.monotonic() + seconds
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)

torch.zeros(1, device="cuda")
(folder / "ready").touch()
wait_for("go")
held = []
for size in (2**30, 2**26, 2**24):
    while torch.cuda.mem_get_info()[0] > left + size:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            break
(folder / "held").touch()
wait_for("leave")
held.clear()
torch.cuda.empty_cache()
(folder / "released").touch()
"""

# The user's side: at its fifth batch it has nothing cached, and waits until the neighbour has taken the card. After a
# few more, most of which fail, it waits until the neighbour has given the card back.
USER_CODE = """
import os, time
from pathlib import Path
import torch
from torch import nn

FOLDER = Path(os.environ["NEIGHBOUR_FOLDER"])
SAMPLE_BYTES = torch.cuda.get_device_properties(0).total_memory // 600
COMES = 5  # at this batch

def ask_the_neighbour(to, until):
    (FOLDER / to).touch()
    deadline = time.monotonic() + 60
    while not (FOLDER / until).exists():
        if time.monotonic() > deadline:
            raise ValueError(f"the neighbour has not {until} the memory")
        time.sleep(0.01)

def before(batch, *, leaves):
    if batch == COMES:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        ask_the_neighbour("go", "held")
    elif batch == leaves:
        ask_the_neighbour("leave", "released")

def answers():
    calls = []
    def answer(samples):
        calls.append(len(samples))
        before(len(calls), leaves=25)  # single samples have failed by then
        block = torch.empty(len(samples) * SAMPLE_BYTES, dtype=torch.uint8, device="cuda").zero_()
        torch.cuda.synchronize()
        del block
        torch.cuda.empty_cache()
        return [sample.prompt for sample in samples]
    return answer

class Wide(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.first = nn.Linear(6, 2**20, bias=False)
        self.last = nn.Linear(2**20, outputs)
        self.calls = 0

    def forward(self, rows):
        if self.training:
            self.calls += 1
            before(self.calls, leaves=10)  # in the window at which it came, or the next one
        return self.last(torch.tanh(self.first(rows)))

def wide(num_classes: int = 3):
    return Wide(num_classes)
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NEIGHBOUR_FOLDER", str(tmp_path))
    (tmp_path / "user_code.py").write_text(USER_CODE, encoding="utf-8")
    return f"py:{tmp_path / 'user_code.py'}"


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Start the process that will leave so many bytes; returns once it has the device, and nothing of its memory."""
    gc.collect()
    torch.cuda.empty_cache()
    started: list[subprocess.Popen[bytes]] = []

    def start(leave_bytes: int) -> None:
        command = [sys.executable, "-c", NEIGHBOUR, str(tmp_path), str(leave_bytes), str(LONGEST_SECONDS)]
        started.append(subprocess.Popen(command))
        deadline = time.monotonic() + 90
        while not (tmp_path / "ready").exists():
            assert started[0].poll() is None, "the neighbour has ended"
            assert time.monotonic() < deadline, "the neighbour does not start"
            time.sleep(0.05)

    yield start
    for process in started:
        process.kill()
        process.wait()


def document_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a command prints with --json; it must have ended with 0."""
    with pytest.raises(SystemExit) as stop:
        run([*arguments, "--json"])
    captured = capsys.readouterr()
    assert stop.value.code in (0, None), captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document


def test_an_evaluation_loses_no_sample_and_regains_its_size(
    tmp_path: Path, user_code: str, neighbour: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a single sample fits while the neighbour is there."""
    total = torch.cuda.get_device_properties(0).total_memory
    rows = [{"id": str(number), "question": f"q{number}", "answer": f"q{number}"} for number in range(24 * BATCH)]
    data, folder = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    neighbour(total // 1200)
    document = document_of(
        capsys, "eval", f"{user_code}:answers", "-d", str(data), "-o", str(folder), "-b", str(BATCH), "--no-cache",
        "--device", "cuda",
    )  # fmt: skip
    assert (tmp_path / "released").exists()
    summary = document["summary"]
    assert summary["oom_events"] > 0
    assert summary["num_failed"] == 0
    assert summary["metrics"]["exact_match"]["value"] == 1.0
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter(line["id"] for line in lines) == Counter(row["id"] for row in rows)
    assert sum(line["batch_size"] == BATCH for line in lines) >= 0.9 * len(lines)


def test_a_training_run_loses_no_window_and_regains_its_size(
    tmp_path: Path, user_code: str, neighbour: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Some samples fit while the neighbour is there; a window takes a gigabyte or two for every hundred of them."""
    draw = numpy.random.default_rng(0)
    features = draw.standard_normal((STEPS * WINDOW, 6)).astype("float32")
    numpy.savez(tmp_path / "features.npz", features=features, labels=features[:, :3].argmax(axis=1))
    (tmp_path / "train.yaml").write_text(
        f"model: {{type: '{user_code}:wide'}}\n"
        f"data: {{root: {tmp_path / 'features.npz'}, type: features, val_split: none}}\n"
        f"hp: {{epochs: 1, effective_batch: {WINDOW}, batch_size: {WINDOW}, learning_rate: 1.0e-4}}\n"
        "optimizer: {name: sgd}\n"
        "training: {device: cuda, dtype: float32}\n",
        encoding="utf-8",
    )
    neighbour(2**29)
    folder = tmp_path / "run"
    document = document_of(capsys, "train", str(tmp_path / "train.yaml"), "-o", str(folder), "--no-cache")
    assert (tmp_path / "released").exists()
    assert document["summary"]["oom_events"] > 0
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    sizes = [tuple(step["micro_batches"]) for step in steps]
    assert [sum(size) for size in sizes] == [WINDOW] * STEPS  # every window whole, once
    assert steps[-1]["samples"] == STEPS * WINDOW
    assert sizes[:2] == [(WINDOW,)] * 2
    smaller = [place for place, size in enumerate(sizes) if max(size) < WINDOW]
    assert smaller, sizes  # while the neighbour was there
    assert smaller[-1] - smaller[0] <= 2, sizes  # and back within two windows
