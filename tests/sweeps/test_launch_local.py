"""Experiments in processes of their own, without torch: a crash, a hang, an error and a retry, side by side."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from brim.settings.sweep_request import SweepRequest
from brim.sweeps.experiment import ExperimentProcess
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import Job
from brim.sweeps.launch_local import LocalLauncher, _environment, _within
from brim.sweeps.run import SweepPlan, SweepResult, run_sweep
from brim.sweeps.scheduler import Device
from tests.sweeps.sweep_runs import GIB, Watcher, sweep_of, write_child


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = tmp_path_factory.mktemp("local")
    grid = {"model.type": ["one", "crash", "hang", "broken", "memory"], "hp.batch_size": [16]}
    launcher = LocalLauncher(
        [Device(name="cpu", slots=3)], timeout_seconds=6, command=[sys.executable, str(write_child(folder))]
    )
    plan = SweepPlan(expansion=sweep_of(grid).expand())
    return run_sweep(plan, SweepRequest(file="g.yaml"), launcher, output=folder / "out", listener=Watcher())


def why(result: SweepResult, model: str) -> tuple[str, str]:
    outcome = next(one.outcome for one in result.results if one.experiment.flat["model.type"] == model)
    assert outcome is not None
    return outcome.failure, outcome.error


def test_each_failure_is_reported_for_its_experiment(result: SweepResult) -> None:
    assert [one.state for one in result.results] == ["completed", "failed", "failed", "failed", "completed"]
    assert why(result, "crash") == ("killed", "segmentation fault (signal 11)")
    assert why(result, "hang") == ("timeout", "it was not done within 6 s (timeout=) and was ended")
    assert why(result, "broken") == ("error", "ValueError: no such [layer]")


def test_the_traceback_is_in_the_experiments_log(result: SweepResult) -> None:
    broken = next(one for one in result.results if one.experiment.flat["model.type"] == "broken")
    assert "Traceback" in (result.folder / broken.folder / "log.txt").read_text()


def test_out_of_memory_was_survived_by_a_retry_at_half(result: SweepResult) -> None:
    memory = next(one for one in result.results if one.experiment.flat["model.type"] == "memory")
    assert memory.attempts == 2
    assert memory.state == "completed"


def test_a_child_that_is_asked_to_stop_was_interrupted_however_it_ends(tmp_path: Path) -> None:
    """As one that still imports torch at Ctrl-C, or that is killed after the second one."""
    for place, end in enumerate((ExperimentProcess.interrupt, ExperimentProcess.end)):
        command = [sys.executable, "-c", 'import time; print(\'{"event": "up"}\', flush=True); time.sleep(60)']
        child = ExperimentProcess(Job(id="x", settings={}, folder=str(tmp_path / str(place))), command=command)
        while not child.events():
            assert child.running
            time.sleep(0.02)
        child.interrupt()
        end(child)
        outcome = child.outcome()
        assert (outcome.state, outcome.failure) == ("interrupted", "")


CARD_CHILD = """
import json, os, pathlib, sys, time
from brim.running.child_main import serve_parent
from brim.sweeps.experiment import run_job
from brim.sweeps.job import Job

def train(job, send):
    seen = {"card": os.environ.get("CUDA_VISIBLE_DEVICES"), "limit": job.run_settings["training"]["memory_limit"]}
    (pathlib.Path(job.folder) / "seen.json").write_text(json.dumps(seen))
    time.sleep(0.5)
    return {"best": {"top1": 0.5}, "final": {}}, [], "as asked"

sys.exit(serve_parent(lambda requests, send: run_job(Job.from_json(next(requests)), send, train)))
"""


def test_two_cards_are_both_used_and_each_child_is_held_to_its_share(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CARD_CHILD, encoding="utf-8")
    expansion = sweep_of({"model.type": ["a", "b", "c", "d"], "hp.batch_size": [16]}).expand()
    need = SizeForecast(batch_size=16, device_bytes=31 * GIB, context_bytes=GIB, limit_bytes=76 * GIB, fits=True)
    devices = [
        Device(name=f"cuda:{index}", memory_bytes=76 * GIB, slots=4, visible=str(index), context_bytes=GIB)
        for index in range(2)
    ]
    launcher = LocalLauncher(devices, command=[sys.executable, str(child)])
    plan = SweepPlan(expansion=expansion, forecasts={one.id: need for one in expansion})
    watcher = Watcher()
    result = run_sweep(plan, SweepRequest(file="g.yaml"), launcher, output=tmp_path / "out", listener=watcher)
    assert [device for _, device in watcher.starts] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    seen = [json.loads((tmp_path / "out" / one.folder / "seen.json").read_text()) for one in result.results]
    assert [one["card"] for one in seen] == ["0", "1", "0", "1"]
    assert {one["limit"] for one in seen} == {str(33 * GIB)}, "a tenth more than the forecast, without the context"


def a_job(**training: object) -> Job:
    return Job(id="x", settings={"model": {"type": "m"}, "training": training}, folder="f")


def test_an_experiment_that_shares_a_card_is_limited_to_what_it_reserved() -> None:
    device = Device(name="cuda:0", memory_bytes=80 * GIB, slots=4, context_bytes=GIB)
    assert _within(a_job(), 5 * GIB, device).run_settings["training"] == {"memory_limit": str(4 * GIB)}
    assert _within(a_job(memory_limit="2GiB"), 5 * GIB, device).run_settings["training"] == {"memory_limit": "2GiB"}
    assert _within(a_job(), None, device) == a_job()
    assert _within(a_job(), 5 * GIB, Device(name="cpu", slots=4)) == a_job()


def test_a_childs_environment_has_its_card_and_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("BRIM_CORES", "8")
    second = Device(name="cuda:1", slots=4, visible="GPU-5")
    card = {"CUDA_VISIBLE_DEVICES": "GPU-5"}
    assert _environment(second, a_job(), 4) == {**card, "OMP_NUM_THREADS": "2"}, "what the user has set stays"
    monkeypatch.delenv("BRIM_CORES")
    monkeypatch.setattr("brim.sweeps.launch_local.own_cores", lambda: 8)
    assert _environment(second, a_job(), 4) == {**card, "OMP_NUM_THREADS": "2", "BRIM_CORES": "2"}
    assert _environment(second, a_job(), 12) == {**card, "OMP_NUM_THREADS": "1", "BRIM_CORES": "1"}
    assert _environment(second, a_job(), 1) == card
    named = Job(id="x", settings={}, folder="f", device="cuda:1")
    assert "CUDA_VISIBLE_DEVICES" not in _environment(second, named, 1), "it names its card itself"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _environment(second, a_job(), 4) == {**card, "BRIM_CORES": "2"}


CORES_CHILD = """
import json, os, pathlib, sys
from brim.running.child_main import serve_parent
from brim.sweeps.experiment import run_job
from brim.sweeps.job import Job

def train(job, send):
    (pathlib.Path(job.folder) / "seen.json").write_text(json.dumps(os.environ.get("BRIM_CORES")))
    return {"best": {"top1": 0.5}, "final": {}}, [], "as asked"

sys.exit(serve_parent(lambda requests, send: run_job(Job.from_json(next(requests)), send, train)))
"""


@pytest.mark.parametrize(
    ("models", "gib", "cores"),
    [
        (8, 4, "2"),  # eight on two cards
        (8, 30, "4"),  # two on a card, by memory
        (3, 4, "5"),  # there are no more
        (1, 4, None),
    ],
)
def test_experiments_share_the_cores_with_those_that_run_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: int, gib: int, cores: str | None
) -> None:
    monkeypatch.setattr("brim.sweeps.launch_local.own_cores", lambda: 16)
    child = tmp_path / "child.py"
    child.write_text(CORES_CHILD, encoding="utf-8")
    expansion = sweep_of({"model.type": [f"m{index}" for index in range(models)], "hp.batch_size": [16]}).expand()
    need = SizeForecast(batch_size=16, device_bytes=gib * GIB, context_bytes=GIB, limit_bytes=76 * GIB, fits=True)
    devices = [Device(name=f"cuda:{index}", memory_bytes=76 * GIB, slots=4, visible=str(index)) for index in range(2)]
    launcher = LocalLauncher(devices, command=[sys.executable, str(child)])
    plan = SweepPlan(expansion=expansion, forecasts={one.id: need for one in expansion})
    result = run_sweep(plan, SweepRequest(file="g.yaml"), launcher, output=tmp_path / "out", listener=Watcher())
    seen = json.loads((tmp_path / "out" / result.results[0].folder / "seen.json").read_text())
    assert seen == cores
