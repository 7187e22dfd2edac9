"""Jobs on machines of a cluster, done in the sweep's folder where that is shared, else beside it and sent back.

The worker starts the same process as on one machine and waits for it, so that a crash, a hang or an out-of-memory
error means the same there. A job that is lost with its worker is handed in again. Knows neither Ray nor Slurm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from brim.errors import RequestError
from brim.sweeps.experiment_process import CHILD_COMMAND, LOG_FILE, run_to_end
from brim.sweeps.job import OUTCOME_FILE, Job, Outcome, write_outcome
from brim.sweeps.listener import Recorder

__all__ = ["Delivery", "RemoteQueue", "RemoteWork", "receive", "run_remotely"]

MOST_LOSSES = 3  # of one experiment: then it is the experiment that kills its workers

MARK_FILE = ".sweep-mark"  # by its content a worker knows that it sees the very folder of the sweep
SENT_FILES = ("run.json", "epochs.csv", "steps.jsonl", "monitor.csv", LOG_FILE, "weights-best.safetensors")
REASON_LETTERS = 300  # of why a worker was lost
MOST_BYTES = 256 * 2**20  # of a file that is sent back; larger weights stay on the worker's machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """What comes back from a worker."""

    outcome: Outcome
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # none where the folder is shared
    left_behind: tuple[str, ...] = ()  # files too large to be sent, by their path on the worker's machine
    host: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteWork:
    """How the jobs of a sweep are done on a worker's machine; made where the sweep is."""

    mark: tuple[str, str]  # the path of a file of the sweep's folder, and its content
    timeout_seconds: float | None
    command: tuple[str, ...] = CHILD_COMMAND
    place: str = dataclasses.field(default_factory=os.getcwd)  # what relative paths of an experiment start from

    def do(self, job: Job) -> Delivery:
        """On a worker: one attempt."""
        if Path(self.place).is_dir():
            os.chdir(self.place)
        if self._shared():
            return Delivery(outcome=self._run(job), host=platform.node())
        files: dict[str, bytes] = {}
        behind: list[str] = []
        own = Path(tempfile.mkdtemp(prefix="brim-sweep-"))
        folder = own / job.id
        try:
            outcome = self._run(dataclasses.replace(job, folder=str(folder)))
            for path in (folder / name for name in SENT_FILES):
                if path.is_file() and path.stat().st_size <= MOST_BYTES:
                    files[path.name] = path.read_bytes()
                elif path.is_file():
                    behind.append(str(path))
        finally:
            if not behind:  # all that counts is on its way
                shutil.rmtree(own, ignore_errors=True)
        return Delivery(outcome=outcome, files=files, left_behind=tuple(behind), host=platform.node())

    def _run(self, job: Job) -> Outcome:
        return run_to_end(job, timeout_seconds=self.timeout_seconds, command=self.command)

    def _shared(self) -> bool:
        path, content = self.mark
        try:
            return Path(path).read_text(encoding="utf-8") == content
        except OSError:
            return False


class RemoteQueue(Protocol):
    """A cluster that jobs are handed in to; a handle is what it knows a job by."""

    worker: str  # what is lost with a job: worker, Slurm job

    def submit(self, jobs: Sequence[Job], work: RemoteWork) -> list[tuple[Any, str]]:
        """Hand jobs in: the handle of each, and what it runs on."""

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, Delivery | Exception]]:
        """Wait a moment for jobs to end: what came of those that have, in the end an error where one was lost."""

    def cancel(self, handle: Any) -> None:
        """End a job, which may be over."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Task:
    job: Job
    handle: Any
    losses: int = 0


def run_remotely(
    queue: RemoteQueue,
    jobs: Sequence[Job],
    recorder: Recorder,
    *,
    timeout_seconds: float | None,
    command: Sequence[str] | None,
) -> None:
    """Every job to its end, and what is to be tried again as well. Ctrl-C ends them; what is finished is kept."""
    work = RemoteWork(
        mark=_mark(Path(jobs[0].folder).parent.parent),
        timeout_seconds=timeout_seconds,
        command=tuple(command or CHILD_COMMAND),
    )
    tasks = _submit(queue, jobs, work, recorder)
    try:
        while tasks:
            for handle, result in queue.wait([task.handle for task in tasks]):
                task = next(task for task in tasks if task.handle == handle)
                tasks.remove(task)
                again = _after(task, result, queue.worker, recorder)
                if again is not None:
                    (fresh,) = _submit(queue, [again], work, recorder)
                    # A new size: what was lost before is no evidence.
                    fresh.losses = task.losses if again.retries == task.job.retries else 0
                    tasks.append(fresh)
    except BaseException:
        for task in tasks:
            with contextlib.suppress(Exception):
                queue.cancel(task.handle)
        raise


def _submit(queue: RemoteQueue, jobs: Sequence[Job], work: RemoteWork, recorder: Recorder) -> list[_Task]:
    submitted = queue.submit(jobs, work)
    for job, (_, place) in zip(jobs, submitted, strict=True):
        recorder.started(job, place)
    return [_Task(job=job, handle=handle) for job, (handle, _) in zip(jobs, submitted, strict=True)]


def _after(task: _Task, result: Delivery | Exception, worker: str, recorder: Recorder) -> Job | None:
    """See to a job that is over: its outcome, or that it was lost; gives the job to hand in next."""
    job = task.job
    if isinstance(result, RequestError):
        raise result
    if isinstance(result, Delivery):
        receive(result, Path(job.folder))
        for path in result.left_behind:
            recorder.note(f"{job.id}: too large to be sent back, left on {result.host}: {path}")
        return recorder.ended(job, result.outcome)
    task.losses += 1
    lines = [line.strip() for line in str(result).splitlines() if line.strip()]
    reason = lines[-1][:REASON_LETTERS] if lines else type(result).__name__
    if task.losses < MOST_LOSSES:
        recorder.note(f"{job.id}: its {worker} was lost ({reason}); it is started again")
        return dataclasses.replace(job, attempt=job.attempt + 1)
    error = f"{task.losses} {worker}s were lost at it, the last: {reason}"
    return recorder.ended(job, Outcome(id=job.id, attempt=job.attempt, state="failed", failure="killed", error=error))


def receive(delivery: Delivery, folder: Path) -> None:
    """Put what was sent back into the experiment's folder, the outcome last."""
    if not delivery.files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in delivery.files.items():
        assert name in SENT_FILES
        (folder / name).write_bytes(content)
    (folder / OUTCOME_FILE).unlink(missing_ok=True)
    if delivery.outcome.state == "completed":
        write_outcome(folder, delivery.outcome)


def _mark(sweep: Path) -> tuple[str, str]:
    """A file of the sweep's folder, and what is in it."""
    path = sweep / MARK_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(16), encoding="utf-8")
    return str(path), path.read_text(encoding="utf-8")
