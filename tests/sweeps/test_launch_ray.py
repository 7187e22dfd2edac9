"""`--on ray` on a Ray of this machine: two workers without a GPU, one of which is killed; and what tasks ask for."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.running.ray_cluster import RayCluster
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.job import Job
from brim.sweeps.launch_ray import ClusterCard, RayLauncher, task_resources
from brim.sweeps.run import SweepPlan, run_sweep
from tests.sweeps.sweep_runs import CHILD, GIB, Watcher, journal_of, sweep_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (brim[ray])")

# The first process that finds the file ends its parent, the worker, and so itself.
DOOMED = """
import os, pathlib, signal, time
try:
    pathlib.Path(__file__).with_name("doomed").unlink()
except FileNotFoundError:
    pass
else:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


@needs_ray
def test_a_killed_worker_is_replaced_and_the_sweep_ends_complete(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(DOOMED + CHILD, encoding="utf-8")
    (tmp_path / "doomed").touch()
    watcher = Watcher()
    plan = SweepPlan(expansion=sweep_of({"model.type": ["one", "two", "broken"]}).expand())
    launcher = RayLauncher(workers=2, command=[sys.executable, str(child)])
    folder = tmp_path / "out"
    result = run_sweep(plan, SweepRequest(file="grid.yaml", on="ray"), launcher, output=folder, listener=watcher)
    assert not (tmp_path / "doomed").exists(), "a worker was killed"
    assert [one.state for one in result.results] == ["completed", "completed", "failed"]
    assert "no such [layer]" in result.document["failures"][0]["error"]
    assert sum("its worker was lost" in note for note in watcher.notes) == 1
    ends = [entry["outcome"]["id"] for entry in journal_of(folder) if entry["event"] == "ended"]
    assert len(ends) == len(set(ends)) == 3
    assert (folder / result.results[0].folder / "finished.txt").read_text().count("\n") == 1


class RayError(Exception):
    """As Ray's, for a worker that is gone."""


class DeadlyRay:
    """A cluster on which every worker dies."""

    def __init__(self) -> None:
        self.exceptions = type("exceptions", (), {"RayError": RayError})
        self.submitted = 0

    def remote(self, *arguments: Any, **options: Any) -> Any:
        return self if callable(arguments[0] if arguments else None) else lambda function: self

    def options(self, **options: Any) -> Any:
        return type("Task", (), {"remote": self.submit})()

    def submit(self, *arguments: Any, **settings: Any) -> str:
        self.submitted += 1
        return f"task {self.submitted}"

    def nodes(self) -> list[Any]:
        return []

    def wait(self, handles: list[str], **settings: Any) -> tuple[list[str], list[str]]:
        return handles[:1], handles[1:]

    def get(self, handle: str) -> Any:
        raise RayError("The worker died. exit detail: killed. Some common causes include: none")


def test_an_experiment_that_kills_its_workers_fails_after_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, watcher = DeadlyRay(), Watcher()
    monkeypatch.setattr("brim.sweeps.launch_ray.connected_ray", lambda workers: contextlib.nullcontext(RayCluster(ray)))
    plan = SweepPlan(expansion=sweep_of({"model.type": ["one"]}).expand())
    request = SweepRequest(file="grid.yaml", on="ray")
    result = run_sweep(plan, request, RayLauncher(), output=tmp_path / "out", listener=watcher)
    assert ray.submitted == 3
    assert len(watcher.notes) == 2
    (lost,) = result.document["failures"]
    assert (lost["failure"], lost["error"]) == ("killed", "3 workers were lost at it, the last: killed")


def job(gib: float | None = None, **more: Any) -> Job:
    needed = None if gib is None else int(gib * GIB)
    return Job(id="x", settings={"model": {"type": "m"}}, folder="f", bytes_needed=needed, **more)


H100 = ClusterCard(memory_bytes=80 * GIB, kind="H100")
A10 = ClusterCard(memory_bytes=24 * GIB, kind="A10G")


@pytest.mark.parametrize(
    ("asked", "cards", "per_gpu", "expected"),
    [
        (job(7.6), [H100], None, {"num_gpus": 0.1}),
        (job(0.1), [H100], None, {"num_gpus": 0.05}),
        (job(60), [H100], None, {"num_gpus": 1.0}),
        (job(), [H100], None, {"num_gpus": 1}),
        (job(), [H100], 4, {"num_gpus": 0.25}),
        (job(7.6), [H100], 4, {"num_gpus": 0.25}),
        (job(7.6, alone=True), [H100], 4, {"num_gpus": 1}),
        (job(7.6, device="cpu"), [H100], None, {"num_gpus": 0}),
        (job(7.6), [], None, {"num_gpus": 0}),
        (job(5.7), [H100, A10], None, {"num_gpus": 0.25}),
        (job(30), [H100, A10], None, {"num_gpus": 0.4, "accelerator_type": "H100"}),
        (job(100), [H100, A10], None, {"num_gpus": 1.0}),
    ],
)
def test_tasks_ask_for_the_part_of_a_card_that_their_memory_needs(
    asked: Job, cards: list[ClusterCard], per_gpu: int | None, expected: dict[str, Any]
) -> None:
    assert task_resources(asked, cards, jobs_per_gpu=per_gpu) == {"num_cpus": 1, **expected}
