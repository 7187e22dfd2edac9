"""The parent's end of an experiment's process: start it, hear it, stop it, and know how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.memory.failures import FailureKind, classify_exit
from brim.sweeps.experiment import INTERRUPTED
from brim.sweeps.job import FailureWord, Job, Outcome, read_outcome

__all__ = ["CHILD_COMMAND", "LOG_FILE", "ChildProcess", "run_to_end"]

CHILD_COMMAND = (sys.executable, "-m", "brim.sweeps.experiment")
LOG_FILE = "log.txt"
GRACE_SECONDS = 60.0  # for the step under way and a checkpoint, after Ctrl-C


class ChildProcess:
    """One attempt in a process, and a session, of its own."""

    def __init__(
        self, job: Job, *, environment: Mapping[str, str] | None = None, command: Sequence[str] = CHILD_COMMAND
    ) -> None:
        self.job = job
        self.started_at = time.monotonic()
        self.silent = False  # it has closed the pipe: nothing more will be heard
        self._pending = b""
        self._asked_to_stop = False
        self._ended_because: tuple[FailureWord, str] | None = None
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environment is None else {**os.environ, **environment},
                start_new_session=True,  # Ctrl-C in the terminal is the sweep's to pass on
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it died at once: its exit code says how
            self._process.stdin.write(json.dumps(job.to_json()).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started_at

    def fileno(self) -> int:
        """Of the pipe that its news come through."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def news(self) -> list[dict[str, Any]]:
        """What it has said since the last time; nothing is waited for."""
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fileno(), 65536):
                chunks.append(chunk)
            self.silent = True
        *lines, self._pending = (self._pending + b"".join(chunks)).split(b"\n")
        return [event for event in map(_event, lines) if event is not None]

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Ask it to stop after the step under way, with a checkpoint; however it ends then, it was interrupted."""
        self._asked_to_stop = True
        self._signal(signal.SIGINT)

    def kill(self, failure: FailureWord = "", reason: str = "") -> None:
        """End it and its own children at once; a reason makes that its outcome."""
        if failure:
            self._ended_because = (failure, reason)
        self._signal(signal.SIGKILL, group=True)

    def close(self) -> Outcome:
        """Wait for its end, release what is held for it, and say how it ended."""
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self._outcome(code)

    def _outcome(self, code: int) -> Outcome:
        job = self.job
        told = read_outcome(Path(job.folder), id=job.id)
        if told is not None and (told.state == "completed" or told.attempt == job.attempt):
            return told
        failure, error = self._ended_because or self._death(code)
        interrupted = (code == INTERRUPTED or self._asked_to_stop) and self._ended_because is None
        return Outcome(
            id=job.id,
            attempt=job.attempt,
            state="interrupted" if interrupted else "failed",
            failure="" if interrupted else failure,
            error="" if interrupted else error,
            seconds=self.seconds,
            batch_size_reason=job.changed_because,
        )

    def _death(self, code: int) -> tuple[FailureWord, str]:
        """Why a process that left no outcome is gone."""
        ended = classify_exit(code)
        reason = "it ended without an outcome" if ended is None else ended.reason
        word: FailureWord = "killed"
        if ended is not None and ended.kind is FailureKind.OUT_OF_MEMORY:
            word = "out_of_memory"
        last = self._last_words()
        return word, f"{reason}; it last wrote: {last}" if last else reason

    def _last_words(self) -> str:
        try:
            with (Path(self.job.folder) / LOG_FILE).open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - 4096, 0))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip()[:200] if lines else ""

    def _signal(self, number: int, *, group: bool = False) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def run_to_end(
    job: Job,
    *,
    timeout_seconds: float | None,
    told: Callable[[dict[str, Any]], None] | None = None,
    command: Sequence[str] = CHILD_COMMAND,
) -> Outcome:
    """One attempt, waited for: what a worker of a cluster does with a job."""
    child = ChildProcess(job, command=command)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(child, selectors.EVENT_READ)
            while child.running:
                time.sleep(0.05) if child.silent else selector.select(0.5)
                for event in child.news():
                    if told is not None:
                        told(event)
                if timeout_seconds is not None and child.seconds > timeout_seconds:
                    child.kill("timeout", timed_out(timeout_seconds))
                    break
    except BaseException:
        child.kill()
        raise
    return child.close()


def timed_out(seconds: float) -> str:
    """What is said of an experiment that took too long."""
    return f"it was not done within {seconds:g} s (--timeout) and was ended"


def _event(line: bytes) -> dict[str, Any] | None:
    """One line of news; what is none is left out, since user code may get hold of any file descriptor."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
