"""The state of a sweep on disk: which experiments were started, how each ended. Survives kill −9 at any byte.

    journal.jsonl        an entry for every start and every end
    experiments/ID/      the training run of each, with its outcome.json
    .lock                while a sweep runs, so that two never share a folder (storage/run_lock.py)

What an experiment's process finished while no sweep ran to record it is taken over on the next start.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import RequestError
from brim.settings.caller import given, named
from brim.storage.journal import Journal
from brim.storage.run_folder import check_no_other_run
from brim.storage.run_lock import locked_folder
from brim.sweeps.job import AttemptOutcome, Job, SweepListener, read_outcome

__all__ = ["SweepState", "check_contents"]

JOURNAL = "journal.jsonl"
_JOURNAL_OF = "brim.sweep/1"  # not of a file's content: experiments are distinguished by their ids


def check_contents(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or a sweep without `resume`, or none with it. Nothing is forecast yet."""
    check_no_other_run(folder, "sweep")
    journal = folder / JOURNAL
    if resume and not journal.exists():
        raise RequestError(f"{named('resume')}: there is no sweep in {folder}; give its folder with -o")
    if not resume and journal.is_file() and journal.read_bytes().count(b"\n") > 1:  # more than its first line
        raise RequestError(
            f"{given('output', folder)}: it holds a sweep; continue it with {named('resume')}, or choose another folder"
        )


class SweepState:
    """A sweep's folder, opened by the one process that runs it.

    with SweepState(folder, resume=True) as state:
        done = state.completed(ids)
        state.started(job, "cuda:0")
        state.ended(outcome)
    """

    def __init__(self, folder: Path, *, resume: bool = False, note: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self._resume = resume
        self._note = note or SweepListener().note
        self._journal = Journal(folder / JOURNAL, fingerprint=_JOURNAL_OF, resume=resume, check=_problem)
        self._held = contextlib.ExitStack()
        self._ends: dict[str, AttemptOutcome] = {}
        self._starts: dict[str, int] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked_folder(self.folder, command="sweep", note=self._note))
            check_contents(self.folder, resume=self._resume)
            stack.enter_context(self._journal)
            self._held = stack.pop_all()
        for line in self._journal.notes:
            self._note(line)
        for entry in self._journal.entries:
            self._take(entry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def experiment_folder(self, experiment: str) -> Path:
        """Where an experiment's training run goes."""
        return self.folder / "experiments" / experiment

    def completed(self, ids: Iterable[str]) -> dict[str, AttemptOutcome]:
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

    def unknown_experiments(self, ids: Iterable[str]) -> list[str]:
        """Experiments that the folder has and the file no longer has."""
        known = set(ids)
        return [name for name in self._starts if name not in known]

    def started(self, job: Job, device: str) -> None:
        """Note that an attempt begins."""
        self._append({"event": "started", "id": job.id, "attempt": job.attempt, "device": device, "at": _now()})
        self._starts[job.id] = self._starts.get(job.id, 0) + 1

    def ended(self, outcome: AttemptOutcome) -> None:
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
            outcome = AttemptOutcome.from_json(entry["outcome"])
            self._ends[outcome.id] = outcome

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.append([entry])


def _problem(entry: Mapping[str, Any]) -> str | None:
    """Why a line of the journal is neither a start nor an end; None: it is one."""
    try:
        known = isinstance(entry["id"] if entry["event"] == "started" else _ended(entry), str)
    except (KeyError, TypeError):
        known = False
    return None if known else "neither a start nor an end of an experiment"


def _ended(entry: Mapping[str, Any]) -> str | None:
    return AttemptOutcome.from_json(entry["outcome"]).id if entry["event"] == "ended" else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
