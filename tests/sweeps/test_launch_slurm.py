"""`--on slurm` through submitit, whose local executor stands in for Slurm."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.job import Job
from brim.sweeps.launch_slurm import SlurmLauncher
from brim.sweeps.run import SweepPlan, run_sweep
from tests.sweeps.sweep_runs import Watcher, sweep_of, write_child

needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="submitit is not installed (brim[slurm])"
)


@needs_submitit
def test_experiments_run_as_jobs_and_a_failed_one_fails_alone(tmp_path: Path) -> None:
    plan = SweepPlan(expansion=sweep_of({"model.type": ["one", "crash"]}).expand())
    launcher = SlurmLauncher(
        settings={"cluster": "local"}, command=[sys.executable, str(write_child(tmp_path))], timeout_seconds=60
    )
    watcher = Watcher()
    request = SweepRequest(file="grid.yaml", on="slurm", slurm={"cluster": "local"})
    result = run_sweep(plan, request, launcher, output=tmp_path / "out", listener=watcher)
    assert [one.state for one in result.results] == ["completed", "failed"]
    assert "segmentation fault" in result.document["failures"][0]["error"]
    assert watcher.notes == []


def a_job(tmp_path: Path) -> Job:
    return Job(id="x", settings={}, folder=str(tmp_path / "experiments" / "x"))


@needs_submitit
def test_without_slurm_the_message_says_where_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="there is no sbatch here"):
        SlurmLauncher(settings={}).run([a_job(tmp_path)], Watcher())  # type: ignore[arg-type]


def test_without_submitit_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RequestError, match=r"pip install 'brim\[slurm\]'"):
        SlurmLauncher(settings={}).run([a_job(tmp_path)], Watcher())  # type: ignore[arg-type]


def test_options_of_sbatch_and_submitit_are_distinguished() -> None:
    launcher = SlurmLauncher(settings={"partition": "gpu", "mem_gb": 32}, timeout_seconds=600)
    assert launcher._parameters() == {
        "timeout_min": 20,
        "name": "brim-sweep",
        "gpus_per_node": 1,
        "slurm_partition": "gpu",
        "mem_gb": 32,
    }
    with pytest.raises(RequestError, match="'cluster': 'moon'"):
        SlurmLauncher(settings={"cluster": "moon"})
