"""The state of a sweep on disk: which experiments were started, how each ended. Survives kill −9 at any byte.

    journal.jsonl        an entry for every start and every end
    experiments/ID/      the training run of each, with its outcome.json
    .lock                held while a sweep runs, so that two never share a folder

What an experiment's process finished while nobody was there to note it is taken over on the next start.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from brim.errors import RequestError
from brim.storage.journal import Journal
from brim.storage.run_folder import check_folder
from brim.sweep.job import Job, Outcome, read_outcome

__all__ = ["SweepState"]

_JOURNAL_OF = "brim.sweep/1"  # not of a file's content: experiments are told apart by their ids


class SweepState:
    """A sweep's folder, opened by the one process that runs it.

    with SweepState(folder, resume=True) as state:
        done = state.completed(ids)
        state.started(job, "cuda:0")
        state.ended(outcome)
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self._resume = resume
        self._journal = Journal(folder / "journal.jsonl", fingerprint=_JOURNAL_OF, resume=resume)
        self._lock: IO[str] | None = None
        self._ends: dict[str, Outcome] = {}
        self._starts: dict[str, int] = {}

    def __enter__(self) -> Self:
        check_folder(self.folder)
        if self._resume and not (self.folder / "journal.jsonl").exists():
            raise RequestError(f"--resume: there is no sweep in {self.folder}; give its folder with -o")
        self._take_lock()
        try:
            self._journal.__enter__()
        except BaseException:
            self._release()
            raise
        for entry in self._journal.entries:
            self._take(entry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.__exit__(kind, error, trace)
        self._release()

    def experiment_folder(self, experiment: str) -> Path:
        """Where an experiment's training run goes."""
        return self.folder / "experiments" / experiment

    def completed(self, ids: Iterable[str]) -> dict[str, Outcome]:
        """Those of the experiments that are done, with what was finished after the sweep itself was killed."""
        found = {}
        for name in ids:
            end = self._ends.get(name)
            if end is None or end.state != "completed":
                left = read_outcome(self.experiment_folder(name), id=name)
                if left is None or left.state != "completed":
                    continue
                self.ended(left)
                end = left
            found[name] = end
        return found

    def attempts(self, experiment: str) -> int:
        """How often it was started, in this sweep and those it resumes."""
        return self._starts.get(experiment, 0)

    def strangers(self, ids: Iterable[str]) -> list[str]:
        """Experiments that the folder has and the file has no more."""
        known = set(ids)
        return [name for name in self._starts if name not in known]

    def started(self, job: Job, device: str) -> None:
        """Note that an attempt begins."""
        self._append({"event": "started", "id": job.id, "attempt": job.attempt, "device": device, "at": _now()})
        self._starts[job.id] = self._starts.get(job.id, 0) + 1

    def ended(self, outcome: Outcome) -> None:
        """Note how an attempt ended; an experiment is completed once, whatever happens."""
        before = self._ends.get(outcome.id)
        if before is not None and before.state == "completed":
            return
        self._append({"event": "ended", "at": _now(), "outcome": outcome.to_json()})
        self._ends[outcome.id] = outcome

    def _take(self, entry: dict[str, Any]) -> None:
        if entry.get("event") == "started":
            name = str(entry["id"])
            self._starts[name] = self._starts.get(name, 0) + 1
        elif entry.get("event") == "ended":
            outcome = Outcome.from_json(entry["outcome"])
            self._ends[outcome.id] = outcome

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.append([entry])

    def _take_lock(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise RequestError(f"cannot write {self.folder}: {error.strerror or error}") from error
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows: the lock is not held there
            pass
        except OSError as error:
            lock.close()
            raise RequestError(
                f"{self.folder}: a sweep is running in it; wait for its end, or choose another folder"
            ) from error
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
