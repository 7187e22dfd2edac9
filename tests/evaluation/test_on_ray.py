"""`--on ray` on a Ray of this machine: two workers without a GPU, one of which is killed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.errors import LostError, RequestError
from brim.evaluation import on_ray
from brim.evaluation.on_ray import RemoteWorker, WorkerResources, evaluate_on_ray
from brim.evaluation.run import EvalResult
from brim.evaluation.worker import EvalListener
from brim.running.ray_cluster import RayCluster, WorkerLostError
from brim.running.results import ExecutionFigures
from brim.settings.declare import read_settings
from brim.settings.eval_settings import EvalRequest, EvaluateSettings
from tests.evaluation.evaluation_runs import lines_of, record_of, run, shout, without_sizes, write_words

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (brim[ray])")

# A metric that is asked once for every sample: the worker that finds the file ends in the middle of its shard.
FATES = """
import os, pathlib, signal, time
from brim.metrics.base import Metric

class Fates(Metric):
    name = "fates"
    count = 0

    def compare(self, prediction, references, sample):
        time.sleep(0.02)
        self.count += 1
        if self.count == 6:
            try:
                pathlib.Path(__file__).with_name("doomed").unlink()
            except FileNotFoundError:
                return 1.0
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0
"""


class Watcher(EvalListener):
    """Keeps what it is told, and what Ray listens on; interrupts the run when so many samples are done."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.told: list[tuple[int, int]] = []
        self.device = ""
        self.addresses: set[str] = set()
        self.processes: list[psutil.Process] = []
        self.sessions: set[str] = set()  # Ray's own folders
        self._interrupt_after = interrupt_after

    def opened(self, facts: Any) -> None:
        self.device = facts.device

    def started(self, total: int, done: int) -> None:
        self.told.append((total, done))

    def batch(self, figures: ExecutionFigures, *, cap: int, reserved_bytes: int | None) -> None:
        if not self.addresses:
            self.processes = [
                one for one in psutil.Process().children(recursive=True) if "ray" in " ".join(one.cmdline())
            ]
            commands = " ".join(word for one in self.processes for word in one.cmdline())
            self.sessions = set(re.findall(r"/[^\s=]*?/session_\d[\w-]*", commands))
            self.addresses = set(listening([psutil.Process(), *self.processes]))
        if self._interrupt_after is not None and figures.items >= self._interrupt_after:
            raise KeyboardInterrupt

    def note(self, line: str) -> None:
        self.notes.append(line)


def listening(processes: list[psutil.Process]) -> Iterator[str]:
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                yield connection.laddr.ip


@dataclasses.dataclass
class Session:
    """A run that was interrupted, and the one that finished it although a worker was killed."""

    interrupted: Watcher
    kept: int
    left: list[psutil.Process]
    resumed: Watcher
    result: EvalResult
    alone: EvalResult
    folder: Path


@pytest.fixture(scope="module")
def session(language_model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("ray")
    plugin = folder / "fates.py"
    plugin.write_text(FATES, encoding="utf-8")
    settings: dict[str, Any] = {"max_new_tokens": 5, "plugins": (str(plugin),), "metrics": ("token_f1", "fates")}
    alone = run(language_model, questions, folder / "alone", batch_size=2, **settings)
    request = EvalRequest(
        model=str(language_model), data=str(questions), batch_size=2, device="cpu", use_cache=False, **settings
    )
    first, second = Watcher(interrupt_after=2), Watcher()
    with pytest.raises(KeyboardInterrupt):
        evaluate_on_ray(request, output=folder / "run", listener=first, workers=2)
    _, left = psutil.wait_procs(first.processes, timeout=20)
    kept = len(lines_of(folder / "run"))
    (folder / "doomed").touch()
    resume = dataclasses.replace(request, resume=True)
    result = evaluate_on_ray(resume, output=folder / "run", listener=second, workers=2)
    return Session(first, kept, left, second, result, alone, folder / "run")


@needs_ray
def test_the_loss_of_a_worker_costs_no_sample_and_records_none_twice(session: Session) -> None:
    assert not (session.folder.parent / "doomed").exists(), "a worker was killed"
    assert without_sizes(lines_of(session.folder)) == without_sizes(session.alone.samples)
    assert session.result.metrics == session.alone.metrics
    lost = [note for note in session.resumed.notes if "was lost" in note]
    assert len(lost) == 1
    assert "samples of its shard go to the others, and a new worker is started" in lost[0]
    assert record_of(session.folder)["summary"]["notes"] == list(session.result.notes)
    assert lost[0] in session.result.notes


@needs_ray
def test_the_record_is_that_of_ranks(session: Session) -> None:
    summary = record_of(session.folder)["summary"]
    assert summary["num_samples"] == 14
    assert summary["num_resumed"] == session.kept
    assert summary["ranks"] == len(summary["batch_sizes"]["per_rank"]) >= 2
    assert set(summary["batch_sizes"]["per_rank"]) <= {0, 1, 2}
    assert summary["batch_size_used"] == 2
    assert summary["throughput"][-1][1] == 14 - session.kept
    assert summary["alloc_retries"] is None, "the CPU has no allocator that counts them"
    assert record_of(session.folder)["request"]["resume"] is True
    assert (session.folder / "monitor.csv").read_text(encoding="utf-8").startswith("time_seconds,")


@needs_ray
def test_an_interrupt_ends_every_worker_and_keeps_what_is_finished(session: Session) -> None:
    assert session.interrupted.processes
    assert session.left == []
    assert 2 <= session.kept < 14
    assert session.resumed.told == [(14, session.kept)]


@needs_ray
def test_a_ray_of_our_own_listens_on_loopback_only(session: Session) -> None:
    assert session.interrupted.addresses
    assert session.interrupted.addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert session.interrupted.device == "2 Ray workers (cpu)"


@needs_ray
def test_a_ray_of_our_own_leaves_no_folder_behind(session: Session) -> None:
    for watcher in (session.interrupted, session.resumed):
        assert watcher.sessions
        assert not [folder for folder in watcher.sessions if Path(folder).exists()]


# One word of a function's answer, slowly.
SLOW = """
import time
def slow():
    def answer(samples):
        time.sleep(0.05 * len(samples))
        return [sample.prompt.upper() for sample in samples]
    return answer
"""


@needs_ray
@pytest.mark.slow
def test_the_loss_of_a_node_is_one_line_and_costs_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    data = write_words(tmp_path / "words.jsonl", 400)
    journal = tmp_path / "run" / "samples.jsonl"
    with tempfile.TemporaryDirectory() as folder:  # short: sockets are made in it
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.setenv(name, folder)
        means: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args={**means, "include_dashboard": False})
        try:
            doomed = cluster.add_node(**means)
            arguments = ["eval", f"py:{tmp_path / 'slow.py'}:slow", "-d", str(data), "-o", str(tmp_path / "run")]
            flags = ["--on", "ray", "--workers", "2", "--device", "cpu", "--no-cache", "-b", "2"]
            process = subprocess.Popen(
                [sys.executable, "-m", "brim", *arguments, *flags],
                env=os.environ | {"RAY_ADDRESS": cluster.address},
                stderr=subprocess.PIPE,
                text=True,
            )
            while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 80):
                time.sleep(0.2)
            cluster.remove_node(doomed, allow_graceful=False)
            _, told = process.communicate(timeout=200)
        finally:
            cluster.shutdown()
        assert process.returncode == 0, told
        assert list(Path(folder).glob("brim*")) == []
    assert len(lines_of(tmp_path / "run")) == 400
    lost = [line for line in told.splitlines() if "lost" in line]
    assert len(lost) == 1, told
    assert len(told.splitlines()) < 8, told


# What needs no Ray.


def test_a_worker_that_is_killed_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    data = write_words(tmp_path / "words.jsonl", 4)
    request = EvalRequest(model=shout(tmp_path), data=str(data), batch_size=2, device="cpu", use_cache=False)
    worker = RemoteWorker(request, WorkerResources(workers=1, gpus=0, cpus=1), str(Path.cwd()), {})
    worker.open()
    list(worker.evaluate([0, 1, 2, 3]))
    assert list(folder.iterdir()) == [], "what it has here nobody would remove"
    header, *rows = worker.trace().splitlines()
    assert header.startswith("time_seconds,")
    assert rows


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    request = EvalRequest(model="m", data="d")
    with pytest.raises(RequestError, match=r"pip install 'brim\[ray\]'"):
        evaluate_on_ray(request, output=tmp_path / "run", listener=EvalListener())


@pytest.mark.parametrize(
    ("settings", "variables", "words"),
    [
        ({"workers": 0}, {}, "--workers 0"),
        ({"gpus_per_worker": 1.5}, {}, "--gpus-per-worker 1.5"),
        ({}, {"RAY_ADDRESS": "ray://head:10001"}, "RAY_ADDRESS=ray://head:10001: .*ray job submit"),
        ({}, {"WORLD_SIZE": "2", "RANK": "0"}, "leave torchrun out"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_ray_starts(
    settings: dict[str, Any], variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=words):
        evaluate_on_ray(EvalRequest(model="m", data="d"), output=tmp_path / "run", listener=EvalListener(), **settings)


@pytest.mark.parametrize(
    ("resources", "workers", "part", "expected"),
    [
        ({"CPU": 8.0}, None, None, WorkerResources(workers=1, gpus=0, cpus=8)),
        ({"CPU": 8.0}, 3, None, WorkerResources(workers=3, gpus=0, cpus=2)),
        ({"CPU": 8.0, "GPU": 4.0}, None, None, WorkerResources(workers=4, gpus=1.0, cpus=1)),
        ({"CPU": 8.0, "GPU": 2.0}, None, 0.4, WorkerResources(workers=4, gpus=0.4, cpus=1)),
        ({"CPU": 8.0, "GPU": 2.0}, 3, 0.2, WorkerResources(workers=3, gpus=0.2, cpus=1)),
    ],
)
def test_workers_are_as_many_as_the_gpus_allow(
    resources: dict[str, float], workers: int | None, part: float | None, expected: WorkerResources
) -> None:
    assert on_ray._worker_resources(resources, EvalRequest(model="m", data="d"), workers, part) == expected


@pytest.mark.parametrize(
    ("resources", "workers", "part", "words"),
    [
        ({"CPU": 2.0}, 3, None, "--workers 3: the Ray cluster has 2 CPUs and no GPU"),
        ({"CPU": 2.0}, None, 0.5, "--gpus-per-worker 0.5: the Ray cluster has 0 GPUs"),
        ({"CPU": 64.0, "GPU": 2.0}, 4, 0.6, "--workers 4: the Ray cluster has 2 GPUs, enough for 2 workers"),
    ],
)
def test_more_workers_than_the_cluster_holds_are_refused(
    resources: dict[str, float], workers: int | None, part: float | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        on_ray._worker_resources(resources, EvalRequest(model="m", data="d"), workers, part)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteWorker]:
    """A worker, in this process."""
    data = write_words(tmp_path / "words.jsonl", 12)
    request = EvalRequest(model=shout(tmp_path), data=str(data), batch_size=2, device="cpu", use_cache=False)
    worker = RemoteWorker(request, WorkerResources(workers=1, gpus=0, cpus=1), str(Path.cwd()), {})
    worker.open()
    yield worker
    worker.trace()


def test_a_worker_sends_every_batch_as_it_is_done_and_each_batch_size_once(remote: RemoteWorker) -> None:
    ids, costs = remote.sample_costs()
    assert len(ids) == len(costs) == 12
    shards = [list(remote.evaluate([0, 1, 2])), list(remote.evaluate([5, 4]))]
    sizes = [[len(event.lines) for event in shard] for shard in shards]
    assert sizes == [[2, 1, 0], [2, 0]]
    counts = [count for shard in shards for event in shard if event.figures for count in event.figures.batch_counts]
    assert counts == [2, 1, 2]
    outcome = shards[1][-1].outcome
    assert outcome is not None
    assert outcome.figures.items == 5, "the figures are those of all its shards"
    entries, summary = remote.summarise(
        [line for shard in shards for event in shard for line in event.lines], [outcome]
    )
    assert [entry["id"] for entry in entries] == ["w0", "w1", "w2", "w4", "w5"]
    assert summary["num_samples"] == 5


def test_what_a_worker_raises_ends_its_shard(remote: RemoteWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(items: Any) -> Any:
        raise LostError("the device is gone")

    monkeypatch.setattr(remote._worker, "run", lost)
    with pytest.raises(LostError, match="the device is gone"):
        list(remote.evaluate([0]))


class Answer:
    """As a reference of Ray: an answer to come, or the error instead."""

    def __init__(self, value: Any) -> None:
        self.value = value


class ActorDiedError(Exception):
    """As Ray's, for a worker that is gone."""


class FakeRay:
    """A cluster on which every worker opens at once and dies in its first shard."""

    def __init__(self, facts: Any) -> None:
        self.exceptions = self
        self.RayError = ActorDiedError
        self.facts = facts
        self.started = 0

    def remote(self, kind: type) -> Any:
        return self

    def options(self, **options: Any) -> Any:
        return type("Kind", (), {"remote": self.start})()

    def start(self, *arguments: Any) -> Any:
        self.started += 1
        answers = {
            "place": "process 1 on here",
            "open": self.facts,
            "sample_costs": (["a", "b"], [1, 1]),
            "evaluate": ActorDiedError("The actor died.\n exit detail: killed. Some common causes include: none."),
        }
        methods = {name: type("Method", (), {"remote": _always(value)})() for name, value in answers.items()}
        return type("Actor", (), methods)()

    def wait(self, refs: list[Any], **settings: Any) -> Any:
        return refs[:1], refs[1:]

    def get(self, ref: Answer, **settings: Any) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: Any) -> None:
        pass


def _always(value: Any) -> Any:
    return lambda self, *arguments: Answer(value)


def pool_of_one(fake: FakeRay, listener: EvalListener) -> Any:
    resources = WorkerResources(workers=1, gpus=0, cpus=1)
    return on_ray._WorkerPool(RayCluster(fake), EvalRequest(model="m", data="d"), resources, listener)


def test_workers_that_die_one_after_the_other_end_the_run(remote: RemoteWorker) -> None:
    facts = remote._worker.setup.facts()
    listener = Watcher()
    fake = FakeRay(facts)
    pool = pool_of_one(fake, listener)
    _, _, costs = pool.gather()
    with pytest.raises(LostError, match=r"3 workers in a row were lost, .*: killed\. What is finished is kept"):
        list(pool.evaluate([0, 1], costs))
    assert fake.started == 3
    assert len(listener.notes) == 2


def test_a_worker_error_ends_the_run_and_a_lost_device_the_worker(remote: RemoteWorker) -> None:
    listener, fake = Watcher(), FakeRay(remote._worker.setup.facts())
    pool = pool_of_one(fake, listener)
    with pytest.raises(RequestError, match="no such file"):
        pool._failed(pool._workers[0], RequestError("--data: no such file"))
    pool._failed(pool._workers[0], WorkerLostError("the device cannot be used again"))
    assert fake.started == 2
    assert "the device cannot be used again" in listener.notes[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workers": 2}, "--workers 2: it goes with --on ray"),
        ({"gpus_per_worker": 0.5}, "--gpus-per-worker 0.5: it goes with --on ray"),
        ({"on": "slurm"}, "--on slurm: only ray"),
        ({"on": "ray", "compare_batch": "1,2"}, "--compare-batch: .* leave --on out"),
    ],
)
def test_flags_of_a_cluster_go_with_a_cluster(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_settings(EvaluateSettings, {"model": "py:x:y", "data": "z", **flags})


def test_workers_that_see_other_files_are_refused(remote: RemoteWorker) -> None:
    facts = remote._worker.setup.facts()
    fake = FakeRay(facts)
    pool = pool_of_one(fake, Watcher())
    pool.gather()
    fake.facts = dataclasses.replace(facts, fingerprint=facts.fingerprint.replace("data:", "data:0"))
    pool._start_worker()
    pool._next_event()  # it has been placed
    with pytest.raises(RequestError, match="does not have the same data as the others"):
        pool._next_event()
