"""kill −9 of a sweep at random moments: every experiment is completed exactly once, and no orphan goes on writing."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.sweeps.sweep_runs import journal_of, write_child

Start = Callable[..., subprocess.Popen[bytes]]

DRIVER = """
import sys
from pathlib import Path
from brim.settings.config_files import read_sweep
from brim.sweeps.launch_local import LocalLauncher
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.run import SweepPlan, run_sweep
from brim.sweeps.scheduler import Device

folder, child = Path(sys.argv[1]), sys.argv[2]
sweep = read_sweep({"model.type": ["one", "two"], "hp.learning_rate": [0.1, 0.2, 0.3]})
request = SweepRequest(file="grid.yaml", resume=(folder / "journal.jsonl").exists())
launcher = LocalLauncher([Device(name="cpu", slots=2)], command=[sys.executable, child])
try:
    run_sweep(SweepPlan(expansion=sweep.expand()), request, launcher, output=folder)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER, encoding="utf-8")
    child = write_child(tmp_path)

    def begin(**variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(driver), str(tmp_path / "out"), str(child)]
        with (tmp_path / "errors.txt").open("w") as errors:
            started.append(subprocess.Popen(command, env={**os.environ, **variables}, stderr=errors))
        return started[-1]

    started: list[subprocess.Popen[bytes]] = []
    yield begin
    for process in started:
        process.kill()
        process.wait()


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def finished(folder: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text().splitlines()) for path in folder.glob("experiments/*/finished.txt")}


def test_a_killed_sweep_completes_every_experiment_exactly_once(start: Start, tmp_path: Path) -> None:
    moments = random.Random(7)
    folder = tmp_path / "out"
    kills = 0
    for _ in range(8):
        sweep = start()
        try:
            sweep.wait(timeout=moments.uniform(0.2, 1.2))
        except subprocess.TimeoutExpired:
            orphans = children_of(sweep)
            sweep.send_signal(signal.SIGKILL)
            sweep.wait()
            kills += 1
            _, alive = psutil.wait_procs(orphans, timeout=10)
            assert alive == [], "a child outlived the sweep"
            continue
        break
    while sweep.returncode != 0:
        sweep = start()
        assert sweep.wait(timeout=60) == 0, (tmp_path / "errors.txt").read_text()
    assert kills > 0
    assert len(finished(folder)) == 6
    ends = [entry["outcome"]["id"] for entry in journal_of(folder) if entry["event"] == "ended"]
    assert sorted(ends) == sorted(finished(folder)), "the journal has each of them completed once"
    for path in folder.glob("experiments/*/steps.txt"):
        writers = [line.split()[0] for line in path.read_text().splitlines()]
        turns = [writer for writer, _ in itertools.groupby(writers)]
        assert len(turns) == len(set(turns)), "a process went on writing after another had begun"


def test_ctrl_c_stops_the_children_and_the_sweep_can_be_resumed(start: Start, tmp_path: Path) -> None:
    sweep = start(STEPS="400", PAUSE="0.05")
    folder = tmp_path / "out"
    deadline = time.monotonic() + 30
    while len(list(folder.glob("experiments/*/steps.txt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = children_of(sweep)
    assert len(children) == 2
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    states = [entry["outcome"]["state"] for entry in journal_of(folder) if entry["event"] == "ended"]
    assert states == ["interrupted", "interrupted"]
    assert start(STEPS="1").wait(timeout=60) == 0
    assert set(finished(folder).values()) == {1}
    assert len(finished(folder)) == 6


def test_two_sweeps_do_not_share_a_folder(start: Start, tmp_path: Path) -> None:
    first = start(STEPS="100", PAUSE="0.05")
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out/experiments/*/steps.txt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    second = start()
    assert second.wait(timeout=30) != 0
    assert f"in use by process {first.pid} on " in (tmp_path / "errors.txt").read_text()
    assert first.poll() is None
