"""Jobs on machines of a cluster, done in the sweep's folder where that is shared, else beside it and sent back.

The worker starts the same process as on one machine and waits for it, so that a crash, a hang or an out-of-memory
error means the same there. A job that is lost with its worker is submitted again. Knows neither Ray nor Slurm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.sweeps.experiment import CHILD_COMMAND, LOG_FILE, run_to_end
from brim.sweeps.job import OUTCOME_FILE, AttemptOutcome, Job, Recorder, write_outcome

__all__ = ["Delivery", "RemoteLauncher", "RemoteWork", "receive"]

MOST_LOSSES = 3  # of one experiment: then it is the experiment that kills its workers
MARK_FILE = ".sweep-mark"  # by its content a worker knows that it sees the very folder of the sweep
SENT_FILES = ("run.json", "epochs.csv", "steps.jsonl", "monitor.csv", LOG_FILE, "weights-best.safetensors")
REASON_LETTERS = 300  # of why a worker was lost
MOST_BYTES = 256 * 2**20  # of a file that is sent back; larger weights stay on the worker's machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """What comes back from a worker."""

    outcome: AttemptOutcome
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

    def _run(self, job: Job) -> AttemptOutcome:
        return run_to_end(job, timeout_seconds=self.timeout_seconds, command=self.command)

    def _shared(self) -> bool:
        path, content = self.mark
        try:
            return Path(path).read_text(encoding="utf-8") == content
        except OSError:
            return False


class RemoteLauncher(ABC):
    """Runs jobs on a cluster, each to its end; a handle is what the cluster knows a job by."""

    worker: str  # what is lost with a job: worker, Slurm job

    def __init__(self, *, timeout_seconds: float | None = None, command: Sequence[str] = CHILD_COMMAND) -> None:
        self._timeout_seconds = timeout_seconds
        self._command = tuple(command)
        self._losses: Counter[str] = Counter()  # by experiment

    def run(self, jobs: Sequence[Job], recorder: Recorder) -> None:
        """Every job to its end, and what is to be tried again as well. Ctrl-C ends them; what is finished is kept."""
        if not jobs:
            return
        sweep = Path(jobs[0].folder).parent.parent
        work = RemoteWork(mark=_mark(sweep), timeout_seconds=self._timeout_seconds, command=self._command)
        with self._connected(sweep):
            running: dict[Any, Job] = {}
            waiting = list(jobs)
            try:
                while waiting or running:
                    submitted = self._submit(waiting, work) if waiting else []
                    for job, (handle, place) in zip(waiting, submitted, strict=True):
                        running[handle] = job
                        recorder.started(job, place)
                    ended = self._wait(list(running))
                    again = [self._after(running.pop(handle), result, recorder) for handle, result in ended]
                    waiting = [job for job in again if job is not None]
            except BaseException:
                for handle in running:
                    with contextlib.suppress(Exception):  # it may be over, or the cluster gone
                        self._cancel(handle)
                raise

    @abstractmethod
    def _connected(self, sweep: Path) -> contextlib.AbstractContextManager[Any]:
        """The cluster, for as long as jobs run; `sweep` is the sweep's folder."""

    @abstractmethod
    def _submit(self, jobs: Sequence[Job], work: RemoteWork) -> list[tuple[Any, str]]:
        """Submit jobs: the handle of each, and what it runs on."""

    @abstractmethod
    def _wait(self, handles: Sequence[Any]) -> list[tuple[Any, Delivery | Exception]]:
        """Wait a moment for jobs to end: what those that have sent back, or the error that they were lost with."""

    @abstractmethod
    def _cancel(self, handle: Any) -> None:
        """End a job."""

    def _after(self, job: Job, result: Delivery | Exception, recorder: Recorder) -> Job | None:
        """See to a job that is over: its outcome, or that it was lost; returns the job to submit next."""
        if isinstance(result, RequestError):
            raise result
        if isinstance(result, Delivery):
            receive(result, Path(job.folder))
            for path in result.left_behind:
                recorder.note(f"{job.id}: too large to be sent back, left on {result.host}: {path}")
            return self._recorded(job, result.outcome, recorder)
        self._losses[job.id] += 1
        lines = [line.strip() for line in str(result).splitlines() if line.strip()]
        reason = lines[-1][:REASON_LETTERS] if lines else type(result).__name__
        if self._losses[job.id] < MOST_LOSSES:
            recorder.note(f"{job.id}: its {self.worker} was lost ({reason}); it is started again")
            return dataclasses.replace(job, attempt=job.attempt + 1)
        error = f"{MOST_LOSSES} {self.worker}s were lost at it, the last: {reason}"
        lost = AttemptOutcome(id=job.id, attempt=job.attempt, state="failed", failure="killed", error=error)
        return self._recorded(job, lost, recorder)

    def _recorded(self, job: Job, outcome: AttemptOutcome, recorder: Recorder) -> Job | None:
        del self._losses[job.id]  # a retry has another size: what was lost before is no evidence
        return recorder.ended(job, outcome)


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
