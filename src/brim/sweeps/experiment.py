"""The process of one experiment: `python -m brim.sweeps.experiment`.

Its job comes as the first line of standard input. The pipe stays open as long as the sweep lives: when it ends, or on
Linux when the kernel says that the parent is gone, this process ends at once, so that no orphan goes on writing. A lock
on the folder makes a second process of the same experiment wait for the first. News go as JSON lines to standard
output; whatever the training prints goes to standard error, which is the experiment's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.storage.run_lock import locked_folder
from brim.sweeps.job import OUTCOME_FILE, FailureWord, Job, Outcome, read_outcome, write_outcome

if TYPE_CHECKING:
    from brim.training.run import TrainResult

__all__ = ["INTERRUPTED", "end_with_parent", "main", "run_job"]

INTERRUPTED = 130
PARENT_GONE = 86  # nobody is there to read it
LOCK_SECONDS = 60.0  # a killed process may take a moment to be gone
NEWS_SECONDS = 0.5  # between two reports of a rate

Tell = Callable[[Mapping[str, Any]], None]
Train = Callable[[Job, Tell], "tuple[dict[str, Any], list[dict[str, Any]], str]"]  # figures, epochs, reason of the size


def main(train: Train | None = None) -> int:
    """Do the job on standard input; `train` is what does the work, by default a training run."""
    line = _first_line()
    end_with_parent()
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return run_job(Job.from_json(json.loads(line)), _teller(news), train or train_run)


def run_job(job: Job, tell: Tell, train: Train) -> int:
    """One attempt, its outcome left in the folder; gives the exit code."""
    folder = Path(job.folder)
    started = time.monotonic()
    try:
        with locked_folder(folder, command="train", wait_seconds=LOCK_SECONDS):
            done = read_outcome(folder, id=job.id)
            if done is not None and done.state == "completed":
                return 0  # a process that was given up had finished after all
            (folder / OUTCOME_FILE).unlink(missing_ok=True)
            outcome = _attempt(job, tell, train, started)
            if outcome.state == "interrupted":
                return INTERRUPTED
            write_outcome(folder, outcome)
            return 0 if outcome.state == "completed" else 1
    except BrimError as error:  # the folder cannot be locked or written
        print(f"brim: {error}", file=sys.stderr)
        return error.exit_code


def train_run(job: Job, tell: Tell) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """A training run, from its last checkpoint where there is one."""
    from brim.settings.train_request import TrainRequest
    from brim.settings.train_settings import train_settings
    from brim.sweeps.training_news import TrainingNews
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
    result = run_training(request, output=Path(job.folder), listener=TrainingNews(tell, seconds=NEWS_SECONDS))
    return _figures(result), [dict(row) for row in result.epochs], _size_reason(job, result)


def _attempt(job: Job, tell: Tell, train: Train, started: float) -> Outcome:
    """Train; what goes wrong becomes the outcome, and its traceback goes to the log."""

    def failed(failure: FailureWord, error: str) -> Outcome:
        traceback.print_exc()
        seconds = time.monotonic() - started
        return Outcome(
            id=job.id, attempt=job.attempt, state="failed", failure=failure, error=error, seconds=seconds,
            batch_size_reason=job.changed_because,
        )  # fmt: skip

    try:
        figures, epochs, reason = train(job, tell)
    except KeyboardInterrupt:
        return Outcome(id=job.id, attempt=job.attempt, state="interrupted", seconds=time.monotonic() - started)
    except DoesNotFitError as error:
        return failed("out_of_memory", str(error))
    except RequestError as error:
        return failed("request", str(error))
    except LostError as error:
        return failed("lost", str(error))
    except Exception as error:
        from brim.memory.failures import FailureKind, classify

        kind = classify(error).kind
        memory = kind in (FailureKind.OUT_OF_MEMORY, FailureKind.AMBIGUOUS, FailureKind.SIZE_LIMIT)
        return failed("out_of_memory" if memory else "error", f"{type(error).__name__}: {error}")
    return Outcome(
        id=job.id, attempt=job.attempt, state="completed", seconds=time.monotonic() - started,
        batch_size_reason=reason, figures=figures, epochs=tuple(epochs),
    )  # fmt: skip


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
    """How the batch size came about, in words."""
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


def _teller(news: IO[str]) -> Tell:
    def tell(event: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone: this process is about to end as well
            news.write(json.dumps(event) + "\n")
            news.flush()

    return tell


def _first_line() -> bytes:
    """Of standard input, byte by byte: what follows is left to the thread that waits for its end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(PARENT_GONE)
        line += byte
    return line


def end_with_parent(*, watch_input: bool = True) -> None:
    """End this process when its parent is gone: the kernel says so on Linux, the end of its input everywhere."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG

    if not watch_input:
        return

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(PARENT_GONE)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
