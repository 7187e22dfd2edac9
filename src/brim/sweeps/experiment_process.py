"""The parent's end of an experiment's process: its events, its stop, and the outcome that its end means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.running.child_main import INTERRUPTED
from brim.running.child_process import ChildProcess, child_command, wait_for_messages
from brim.sweeps.job import Job, Outcome, read_outcome

__all__ = ["CHILD_COMMAND", "LOG_FILE", "ExperimentProcess", "run_to_end"]

CHILD_COMMAND = child_command("brim.sweeps.experiment:serve_experiment")
LOG_FILE = "log.txt"


class ExperimentProcess(ChildProcess):
    """One attempt at an experiment, in a process of its own."""

    def __init__(
        self, job: Job, *, environment: Mapping[str, str] | None = None, command: Sequence[str] = CHILD_COMMAND
    ) -> None:
        self.job = job
        self._asked_to_stop = False
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(command, name=job.id, log=folder / LOG_FILE, environment=environment)
        self.send(job.to_json())

    def events(self) -> list[dict[str, Any]]:
        """What the experiment has reported since the last time: opened, rate, epoch, note."""
        return [message for message in self.messages() if isinstance(message.get("event"), str)]

    def interrupt(self) -> None:
        """Ask it to stop after the step under way, with a checkpoint; however it ends then, it was interrupted."""
        self._asked_to_stop = True
        super().interrupt()

    def end_if_over(self, seconds: float | None) -> None:
        """End it if it has taken longer than that."""
        if seconds is not None and self.seconds > seconds:
            self.end(f"it was not done within {seconds:g} s (--timeout) and was ended")

    def outcome(self) -> Outcome:
        """End it if it is there, and say how the attempt ended: as its folder has it, else as its end tells."""
        job, ending = self.job, self.end()
        written = read_outcome(Path(job.folder), id=job.id)
        if written is not None and (written.state == "completed" or written.attempt == job.attempt):
            return written
        interrupted = ending.code == INTERRUPTED or self._asked_to_stop
        return Outcome(
            id=job.id,
            attempt=job.attempt,
            state="interrupted" if interrupted else "failed",
            failure="" if interrupted else ending.kind,
            error="" if interrupted else ending.reason,
            seconds=self.seconds,
            batch_size_reason=job.changed_because,
        )


def run_to_end(job: Job, *, timeout_seconds: float | None, command: Sequence[str] = CHILD_COMMAND) -> Outcome:
    """One attempt, waited for: what a worker of a cluster does with a job."""
    child = ExperimentProcess(job, command=command)
    try:
        while child.running:
            wait_for_messages([child], 0.5)
            child.events()  # nobody listens, but a full pipe would stop it
            child.end_if_over(timeout_seconds)
    finally:
        child.end()
    return child.outcome()
