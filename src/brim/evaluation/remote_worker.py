"""A worker of a cluster: a model on a device of some machine, the shares it is sent, and the events it sends home.

It is what `on_ray` starts on the cluster, but knows nothing of Ray: its methods are called from far away, and what they
take and give is plain data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brim.evaluation.listener import EvalListener
from brim.evaluation.subject import SubjectFacts, open_subject
from brim.evaluation.summary import RankFigures, summarise
from brim.evaluation.worker import Lines, Worker
from brim.memory.devices import memory_of
from brim.memory.limit import DEFAULT_MARGIN
from brim.models.placement import resolve_device
from brim.monitor.trace_file import TraceText
from brim.running.figures import ExecutionFigures
from brim.settings.eval_settings import EvalRequest

__all__ = ["RemoteWorker", "WorkerEvent", "WorkerResources"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """How many workers, and what each is given."""

    workers: int
    gpus: float  # of each
    cpus: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEvent:
    """What a worker sends home while it works on a share."""

    lines: Lines = dataclasses.field(default_factory=list)
    figures: ExecutionFigures | None = None  # of all its shares; but of the batch sizes only the new ones
    note: str | None = None
    outcome: RankFigures | None = None  # the share is done


class RemoteWorker:
    """Made where it is to run; `open` loads the model, `evaluate` does a share, as often as it is asked."""

    def __init__(
        self, request: EvalRequest, resources: WorkerResources, folder: str, variables: Mapping[str, str]
    ) -> None:
        os.environ.update(variables)
        with contextlib.suppress(OSError):  # relative paths of the request mean the driver's, where that folder exists
            os.chdir(folder)
        self._request = request
        self._resources = resources
        self._trace = TraceText()
        self._relay = _Relay()
        self._sent = 0  # batch sizes

    def place(self) -> str:
        """Where this worker has been placed."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def open(self) -> SubjectFacts:
        """Load the model and read the data."""
        request = self._request
        device = resolve_device(request.device)
        if self._resources.gpus < 1 and device.type == "cuda" and request.memory_limit is None:
            part = int(memory_of(device).total_bytes() * self._resources.gpus * (1 - DEFAULT_MARGIN))
            request = dataclasses.replace(request, memory_limit=part)
        subject = open_subject(request)
        self._worker = Worker(request, subject, self._relay, monitor=self._trace)
        self._worker.__enter__()
        return subject.facts()

    def dealing(self) -> tuple[list[str], list[int]]:
        """Every sample's id and cost."""
        subject = self._worker.subject
        return [sample.id for sample in subject.data.samples], list(subject.costs)

    def evaluate(self, items: list[int]) -> Iterator[WorkerEvent]:
        """Do a share; an event for every batch as it is done, the outcome last."""
        with contextlib.closing(self._worker.run(items)) as finished:
            for lines in finished:
                yield from self._notes()
                counted = self._worker.counted
                new = counted.batch_counts[self._sent :]  # all of them with every batch would be the bulk
                self._sent += len(new)
                yield WorkerEvent(lines=lines, figures=dataclasses.replace(counted, batch_counts=new))
        yield from self._notes()
        yield WorkerEvent(outcome=self._worker.figures())

    def _notes(self) -> Iterator[WorkerEvent]:
        notes, self._relay.notes = self._relay.notes, []
        for note in notes:
            yield WorkerEvent(note=note)

    def summarise(self, lines: Lines, outcomes: Sequence[RankFigures]) -> tuple[Lines, dict[str, Any]]:
        """All lines in the data's order, and the summary of the run."""
        scorer = self._worker.scorer
        entries = scorer.ordered(lines)
        return entries, summarise(entries, scorer, outcomes, bad=len(self._worker.subject.data.bad))

    def keep_plan(self) -> None:
        """File the size found on this machine."""
        self._worker.remember_plan()

    def trace(self) -> str:
        """End the monitor's trace, and give it."""
        self._worker.__exit__(None, None, None)
        return self._trace.text()


class _Relay(EvalListener):
    """Keeps what a worker notes, until it is sent."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Keep it."""
        self.notes.append(line)
