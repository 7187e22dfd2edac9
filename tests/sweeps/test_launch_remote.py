"""Jobs of any cluster: lost ones are handed in again, an interrupt cancels them, files come back from far away."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.job import AttemptOutcome, Job
from brim.sweeps.launch_remote import Delivery, RemoteLauncher, RemoteWork, receive
from brim.sweeps.run import SweepPlan, SweepResult, run_sweep
from tests.sweeps.sweep_runs import Watcher, done, failed, sweep_of, write_child


class FakeCluster(RemoteLauncher):
    """Ends jobs one by one, each with the next of what is planned: a result, or `done` or `failed` of the job."""

    worker = "machine"

    def __init__(self, *ends: Any) -> None:
        super().__init__()
        self.ends = list(ends)
        self.jobs: dict[int, Job] = {}
        self.connected = False
        self.cancelled: list[int] = []

    @contextlib.contextmanager
    def _connected(self, sweep: Path) -> Iterator[None]:
        self.connected = True
        try:
            yield
        finally:
            self.connected = False

    def _submit(self, jobs: Sequence[Job], work: RemoteWork) -> list[tuple[Any, str]]:
        assert jobs
        handles = range(len(self.jobs), len(self.jobs) + len(jobs))
        self.jobs |= dict(zip(handles, jobs, strict=True))
        return [(handle, "far away") for handle in handles]

    def _wait(self, handles: Sequence[Any]) -> list[tuple[Any, Delivery | Exception]]:
        end = self.ends.pop(0)
        if isinstance(end, KeyboardInterrupt):
            raise end
        if callable(end):
            end = Delivery(outcome=end(self.jobs[handles[0]]))
        return [(handles[0], end)]

    def _cancel(self, handle: Any) -> None:
        assert self.connected
        self.cancelled.append(handle)


def run(cluster: FakeCluster, folder: Path, models: Sequence[str] = ("one",)) -> tuple[SweepResult, Watcher]:
    watcher = Watcher()
    plan = SweepPlan(expansion=sweep_of({"model.type": list(models), "hp.batch_size": [16]}).expand())
    return run_sweep(plan, SweepRequest(file="g.yaml"), cluster, output=folder / "out", listener=watcher), watcher


def test_a_lost_job_is_submitted_again_until_three_are_lost(tmp_path: Path) -> None:
    lost = [OSError("the machine\nis gone\n\n") for _ in range(3)]
    cluster = FakeCluster(*lost[:2], done)
    result, watcher = run(cluster, tmp_path / "twice")
    assert [one.state for one in result.results] == ["completed"]
    assert [job.attempt for job in cluster.jobs.values()] == [1, 2, 3]
    assert len(watcher.notes) == 2
    assert "its machine was lost (is gone)" in watcher.notes[0]
    result, _ = run(FakeCluster(*lost), tmp_path / "thrice")
    (failure,) = result.document["failures"]
    assert (failure["failure"], failure["error"]) == ("killed", "3 machines were lost at it, the last: is gone")


def test_what_was_lost_does_not_count_against_a_retry_at_another_size(tmp_path: Path) -> None:
    lost = OSError("gone")
    cluster = FakeCluster(lost, lost, lambda job: failed(job, "out_of_memory"), lost, lost, done)
    result, _ = run(cluster, tmp_path)
    assert [one.state for one in result.results] == ["completed"]
    assert len(cluster.jobs) == 6


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RequestError("no such partition")])
def test_an_interrupt_and_a_wrong_request_cancel_what_is_not_over(tmp_path: Path, end: BaseException) -> None:
    cluster = FakeCluster(done, end)
    with pytest.raises(type(end)):
        run(cluster, tmp_path, ["one", "two", "three"])
    assert cluster.cancelled == ([1, 2] if isinstance(end, KeyboardInterrupt) else [2])
    assert not cluster.connected


def test_without_shared_storage_nothing_is_left_on_the_workers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    asked = Job(id="x", settings={"model": {"type": "one"}, "hp": {"batch_size": 4}}, folder=str(tmp_path / "home"))
    work = RemoteWork(
        mark=(str(tmp_path / "elsewhere"), "mark"),
        timeout_seconds=60,
        command=(sys.executable, str(write_child(tmp_path))),
    )
    delivery = work.do(asked)
    assert delivery.outcome.state == "completed", delivery
    assert delivery.files
    assert list(folder.iterdir()) == []


def test_without_shared_storage_files_are_sent_back_before_the_outcome(tmp_path: Path) -> None:
    outcome = AttemptOutcome(id="x", attempt=1, state="completed")
    receive(Delivery(outcome=outcome, files={"run.json": b"{}", "epochs.csv": b"epoch\n"}), tmp_path / "x")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["epochs.csv", "outcome.json", "run.json"]
    receive(Delivery(outcome=outcome), tmp_path / "y")
    assert not (tmp_path / "y").exists(), "the folder is shared: everything is there already"
