"""What the process of an experiment is given, what it leaves behind, and who is notified of it. Plain values, JSON.

A job is one attempt at an experiment. Its outcome is a file in the experiment's folder, written last and whole: an
experiment is complete if and only if its outcome says so. Knows nothing of processes, devices or torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from brim.settings.nested_keys import flatten, nest
from brim.storage.files import read_json, write_json

__all__ = [
    "OUTCOME_FILE", "AttemptOutcome", "FailureWord", "Job", "Recorder", "State", "SweepListener", "read_outcome",
    "with_changes", "write_outcome",
]  # fmt: skip

OUTCOME_FILE = "outcome.json"
OUTCOME_SCHEMA = "brim.experiment/1"

State = Literal["completed", "failed", "interrupted"]
FailureWord = Literal["", "out_of_memory", "request", "error", "timeout", "killed", "lost"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt at one experiment."""

    id: str
    settings: Mapping[str, Any]  # nested, as the file has them
    folder: str  # where the training run goes
    attempt: int = 1  # of this experiment, those of an earlier start of the sweep counted
    retries: int = 0  # made because an attempt of this start failed
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dotted: what this attempt has otherwise
    changed_because: str = ""  # in words, for the results
    fail_on_oom: bool = False  # a batch size that does not fit ends the experiment
    use_cache: bool = True
    alone: bool = False  # nothing beside it on its device
    bytes_needed: int | None = None  # on its device, the context included; None: unknown
    device: str | None = None  # cpu, cuda:N, mps: the one it must run on; None: any

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings of this attempt, nested."""
        return with_changes(self.settings, self.changes) if self.changes else dict(self.settings)

    @property
    def batch_size(self) -> int | str:
        """What the experiment asks for: a number or auto."""
        asked: int | str = (self.settings.get("hp") or {}).get("batch_size", "auto")
        return asked

    def limited_to(self, memory_bytes: int) -> Job:
        """The job with a memory limit; one that the user gave stands."""
        if (self.settings.get("training") or {}).get("memory_limit") is not None:
            return self
        return dataclasses.replace(self, changes={**self.changes, "training.memory_limit": str(memory_bytes)})

    def to_json(self) -> dict[str, Any]:
        """The job as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Read a job back."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """How one attempt ended."""

    id: str
    attempt: int
    state: State
    failure: FailureWord = ""
    error: str = ""
    seconds: float = 0.0  # of the attempt, from the start of its process: imports, data, training and validation
    batch_size_reason: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the training run
    epochs: tuple[Mapping[str, Any], ...] = ()  # a row for each

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain JSON values, schema first."""
        return {"schema": OUTCOME_SCHEMA, **dataclasses.asdict(self), "epochs": [dict(row) for row in self.epochs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttemptOutcome:
        """Read an outcome back."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in data.items() if name in names}
        return cls(**{**known, "epochs": tuple(known.get("epochs", ()))})


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with some keys, given dotted, of other values; a section may have been empty."""
    flat = {key: value for key, value in flatten(settings).items() if value != {}}
    return nest({**flat, **changes})


def read_outcome(folder: Path, *, id: str) -> AttemptOutcome | None:
    """The outcome in an experiment's folder; None where there is none, or that of another experiment."""
    data: Any = read_json(folder / OUTCOME_FILE)
    if not isinstance(data, dict) or data.get("schema") != OUTCOME_SCHEMA or data.get("id") != id:
        return None
    return AttemptOutcome.from_json(data)


def write_outcome(folder: Path, outcome: AttemptOutcome) -> None:
    """Leave it in the folder, whole or not at all."""
    write_json(folder / OUTCOME_FILE, outcome.to_json())


class SweepListener:
    """Gets the events of a sweep; does nothing by itself."""

    def forecasting(self, what: str) -> None:
        """The memory of an experiment is being forecast."""

    def planned(self, experiments: int, done: int) -> None:
        """So many experiments, of which so many were done before."""

    def started(self, job: Job, device: str) -> None:
        """An attempt begins."""

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        """An experiment reports something: opened, rate, epoch, note."""

    def ended(self, job: Job, outcome: AttemptOutcome, retried: Job | None) -> None:
        """An attempt is over; `retried` is the one that follows it."""

    def note(self, line: str) -> None:
        """Something that the user should know, in one line."""


class Recorder(Protocol):
    """What launchers report to; it writes the journal and decides what is tried again."""

    def started(self, job: Job, device: str) -> None:
        """An attempt begins."""

    def event(self, job: Job, event: Mapping[str, Any]) -> None:
        """An experiment reports something."""

    def ended(self, job: Job, outcome: AttemptOutcome) -> Job | None:
        """An attempt is over; gives the attempt to make next, if there is one."""

    def note(self, line: str) -> None:
        """Something that the user should know."""
