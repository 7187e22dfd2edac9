"""The process of one experiment, both ends: a job is its only request, and what its training reports are its messages.

A lock on the folder makes a second process of the same experiment wait for the first. Whatever the training prints
goes to the experiment's log, and its outcome to a file of its folder, which is what counts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.memory.failures import FailureKind, classify
from brim.monitor.sampler import last_sample
from brim.running.child_main import INTERRUPTED, Send
from brim.running.child_process import ChildProcess, child_command, wait_for_messages
from brim.settings.caller import named
from brim.storage.run_lock import locked_folder
from brim.sweeps.job import OUTCOME_FILE, AttemptOutcome, FailureWord, Job, read_outcome, write_outcome
from brim.training.listener import StepRecord, TrainFacts, TrainListener

if TYPE_CHECKING:
    from brim.training.run import TrainResult

__all__ = ["CHILD_COMMAND", "LOG_FILE", "ExperimentProcess", "run_job", "run_to_end", "serve_experiment", "train_run"]

LOCK_SECONDS = 60.0  # a killed process may take a moment to be gone
EVENT_SECONDS = 0.5  # between two reports of a rate

Train = Callable[[Job, Send], "tuple[dict[str, Any], list[dict[str, Any]], str]"]  # figures, epochs, reason of the size


def serve_experiment(requests: Iterator[dict[str, Any]], send: Send) -> int:
    """In the child: do the job that the parent sends."""
    return run_job(Job.from_json(next(requests)), send, train_run)


def run_job(job: Job, send: Send, train: Train) -> int:
    """One attempt, its outcome left in the folder; gives the exit code. `train` does the work."""
    folder = Path(job.folder)
    started = time.monotonic()
    with locked_folder(folder, command="train", wait_seconds=LOCK_SECONDS):
        done = read_outcome(folder, id=job.id)
        if done is not None and done.state == "completed":
            return 0  # a process that was given up had finished after all
        (folder / OUTCOME_FILE).unlink(missing_ok=True)
        outcome = _attempt(job, send, train, started)
        if outcome.state == "interrupted":
            return INTERRUPTED
        write_outcome(folder, outcome)
        return 0 if outcome.state == "completed" else 1


def train_run(job: Job, send: Send) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """A training run, from its last checkpoint where there is one."""
    from brim.settings.train_request import TrainRequest
    from brim.settings.train_settings import train_settings
    from brim.training.checkpoint import find_checkpoint
    from brim.training.run import run_training

    settings = train_settings(job.run_settings)
    exactly = job.fail_on_oom and settings.hp.batch_size != "auto"
    request = TrainRequest(
        settings=settings,
        fixed=exactly,
        fail_on_oom=exactly,
        use_cache=job.use_cache,
        resume=find_checkpoint(Path(job.folder)) is not None,
    )
    result = run_training(request, output=Path(job.folder), listener=_TrainingEvents(send))
    return _figures(result), [dict(row) for row in result.epochs], _size_reason(job, result)


def _attempt(job: Job, send: Send, train: Train, started: float) -> AttemptOutcome:
    """Train; what goes wrong becomes the outcome, and its traceback goes to the log."""
    try:
        figures, epochs, reason = train(job, send)
    except KeyboardInterrupt:
        return AttemptOutcome(id=job.id, attempt=job.attempt, state="interrupted", seconds=time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        return AttemptOutcome(
            id=job.id, attempt=job.attempt, state="failed", failure=_failure_word(error),
            error=str(error) if isinstance(error, BrimError) else f"{type(error).__name__}: {error}",
            seconds=time.monotonic() - started, batch_size_reason=job.changed_because,
        )  # fmt: skip
    return AttemptOutcome(
        id=job.id, attempt=job.attempt, state="completed", seconds=time.monotonic() - started,
        batch_size_reason=reason, figures=figures, epochs=tuple(epochs),
    )  # fmt: skip


def _failure_word(error: Exception) -> FailureWord:
    words: dict[type[Exception], FailureWord]
    words = {DoesNotFitError: "out_of_memory", RequestError: "request", LostError: "lost"}
    memory = (FailureKind.OUT_OF_MEMORY, FailureKind.AMBIGUOUS, FailureKind.SIZE_LIMIT)
    found = next((word for kind, word in words.items() if isinstance(error, kind)), None)
    return found or ("out_of_memory" if classify(error).kind in memory else "error")


_KEPT = (
    "best_epoch", "epochs", "steps", "samples", "stopped_early", "samples_per_second", "batch_size_used", "batch_sizes",
    "batch_size_max", "effective_batch_size", "accumulation_steps", "eval_batch_size", "oom_events", "alloc_retries",
    "peak_allocated_bytes", "peak_reserved_bytes", "gpu_utilisation_mean", "eval_seconds",
)  # fmt: skip


def _figures(result: TrainResult) -> dict[str, Any]:
    """What a sweep keeps of a run's summary."""
    summary = result.summary
    return {
        "best": {name: value["mean"] for name, value in summary["metrics"].items()},
        "final": dict(summary["last_metrics"]),
        **{name: summary.get(name) for name in _KEPT},
        "train_seconds": summary.get("seconds"),  # an experiment's own are those of its whole process
        "limit_bytes": None if result.plan is None else result.plan.memory.limit_bytes,
        "device": None if result.plan is None else result.plan.device,
        "notes": list(result.notes),
    }


def _size_reason(job: Job, result: TrainResult) -> str:
    """How the batch size was chosen, in words."""
    used, events = result.summary["batch_size_used"], result.summary["oom_events"]
    if job.changed_because:
        return job.changed_because
    if job.batch_size == "auto":
        return "planned" if result.plan is None else f"planned: {result.plan.reason}"
    effective = result.summary["effective_batch_size"]
    if used == job.batch_size or used == effective:
        return "as asked"
    if events:
        return f"{job.batch_size} did not fit: lowered in the run after {events} out-of-memory errors"
    return f"{job.batch_size} asked, {used} used"


class _TrainingEvents(TrainListener):
    """Sends what a training run reports as plain values, rates not more often than every `EVENT_SECONDS`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_at: float | None = None
        self._sent_samples = 0
        self._total = 0

    def opened(self, facts: TrainFacts) -> None:
        """The effective batch is what a retry must keep."""
        self._send({"event": "opened", "effective_batch": facts.effective_batch, "device": facts.device})

    def started(self, total_samples: int, done: int) -> None:
        """From here on samples per second are counted."""
        self._total, self._sent_samples = total_samples, done
        self._sent_at = time.monotonic()

    def step(self, record: StepRecord) -> None:
        """A rate, now and then."""
        now = time.monotonic()
        if self._sent_at is None or now - self._sent_at < EVENT_SECONDS:
            return
        rate = (record.samples - self._sent_samples) / (now - self._sent_at)
        micro, sample = max(record.micro_batches, default=0), last_sample()
        self._send(
            {
                "event": "rate",
                "samples": record.samples,
                "total": self._total,
                "samples_per_second": rate,
                "loss": record.loss,
                "micro_batch": micro,
                "machine": "" if sample is None else sample.short_text(),
            }
        )
        self._sent_at, self._sent_samples = now, record.samples

    def epoch(self, row: dict[str, Any]) -> None:
        """The clock restarts after the validation, which is no training."""
        self._send({"event": "epoch", "row": row})
        self._sent_at = time.monotonic()

    def note(self, line: str) -> None:
        """One line."""
        self._send({"event": "note", "line": line})


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
            self.end(f"it was not done within {seconds:g} s ({named('timeout')}) and was ended")

    def outcome(self) -> AttemptOutcome:
        """End it if it is there, and return how the attempt ended: as its folder has it, else by its exit."""
        job, ending = self.job, self.end()
        written = read_outcome(Path(job.folder), id=job.id)
        if written is not None and (written.state == "completed" or written.attempt == job.attempt):
            return written
        interrupted = ending.code == INTERRUPTED or self._asked_to_stop
        return AttemptOutcome(
            id=job.id,
            attempt=job.attempt,
            state="interrupted" if interrupted else "failed",
            failure="" if interrupted else ending.kind,
            error="" if interrupted else ending.reason,
            seconds=self.seconds,
            batch_size_reason=job.changed_because,
        )


def run_to_end(job: Job, *, timeout_seconds: float | None, command: Sequence[str] = CHILD_COMMAND) -> AttemptOutcome:
    """One attempt, waited for: what a worker of a cluster does with a job."""
    child = ExperimentProcess(job, command=command)
    try:
        while child.running:
            wait_for_messages([child], 0.5)
            child.events()  # the events are not needed, but a full pipe would stop it
            child.end_if_over(timeout_seconds)
    finally:
        child.end()
    return child.outcome()
