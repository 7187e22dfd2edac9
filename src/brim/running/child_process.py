"""A child process that is sent requests and answers in JSON lines, and what its silence, crash or kill means.

    child = ChildProcess(child_command("brim.searching.isolate:serve_probes"), name="the probing process")
    answer = child.ask({"size": 8}, seconds=600)    # or the error that it sent, or a ChildLostError
    child.end()

Nothing is pickled. The child has a session of its own, so that Ctrl-C in the terminal is the parent's to pass on.
What runs in it is its function's matter (`child_main.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.memory.failures import FailureKind, classify_exit

__all__ = ["ChildLostError", "ChildProcess", "Ending", "child_command", "wait_for_messages"]

LOOK_SECONDS = 1.0  # between two checks whether a silent process is there: its children may hold its output open
DYING_SECONDS = 10.0  # from the end of a process's output to its own end
LAST_WORDS_BYTES = 4096
LAST_WORDS_LETTERS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    `kind` is `out_of_memory` where it was killed as the host's out-of-memory killer does, `timeout` where it was
    ended from here, and `killed` for all else.
    """

    code: int
    kind: Literal["out_of_memory", "timeout", "killed"]
    reason: str  # with the last line it wrote


class ChildLostError(LostError):
    """The process ended, or was ended, without an answer."""

    def __init__(self, name: str, ending: Ending) -> None:
        super().__init__(f"{name} was lost: {ending.reason}")
        self.ending = ending


def child_command(function: str) -> tuple[str, ...]:
    """The command of a child that serves with `module:function`."""
    return (sys.executable, "-m", "brim.running.child_main", function)


class ChildProcess:
    """A process that was started here. `log` takes what it prints; without one only its last lines are kept."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.started_at = time.monotonic()
        self.silent = False  # it has closed its output: no message will come
        self._name = name
        self._received = b""
        self._ended_because: str | None = None
        self._ending: Ending | None = None
        self._errors = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115 — closed by `end`
        self._errors_from = os.fstat(self._errors.fileno()).st_size
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,
        )
        os.set_blocking(self.fileno(), False)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started_at

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Of the pipe that its messages come through."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """One request. A process that has ended does not receive it; its exit says why."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def messages(self) -> list[dict[str, Any]]:
        """What it has sent since the last time; nothing is waited for."""
        if self._ending is None:
            self._read()
        *lines, self._received = self._received.split(b"\n")
        return [message for message in map(_message, lines) if message is not None]

    def ask(self, message: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; an error that is sent instead is raised, as the kind it was.

        A process that is gone, or gives no answer in time and is ended, is a `ChildLostError`.
        """
        self.send(message)
        deadline = time.monotonic() + seconds
        while True:
            gone = self.silent or not self.running  # checked before the last lines are read
            answers = self.messages()
            if answers:
                return _or_raise(answers[0])
            if gone:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it is about to end by itself
                    self._process.wait(DYING_SECONDS)
                raise ChildLostError(self._name, self.end())
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildLostError(self._name, self.end(f"no answer within {seconds:g} s; ended"))
            wait_for_messages([self], min(left, LOOK_SECONDS))

    def interrupt(self) -> None:
        """Send it what Ctrl-C sends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def end(self, because: str = "ended") -> Ending:
        """End it with its own children, if it is there, release what is held for it, and return how it ended."""
        if self._ending is None:
            if self.running:
                self._ended_because = because
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
            self._read()
            self._ending = self._classify(code)
            self.silent = True
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self._ending

    def _read(self) -> None:
        """What is there, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fileno(), 65536):
                self._received += chunk
            self.silent = True

    def _classify(self, code: int) -> Ending:
        if self._ended_because is not None:
            return Ending(code=code, kind="timeout", reason=self._ended_because)
        failure, lines = classify_exit(code), self._last_lines()
        reason = "the process ended by itself" if failure is None else failure.reason
        memory = failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY
        return Ending(
            code=code,
            kind="out_of_memory" if memory else "killed",
            reason=f"{reason}; it last wrote: {lines}" if lines else reason,
        )

    def _last_lines(self) -> str:
        """The last line it printed. Read in place: the file's position is the child's."""
        file = self._errors.fileno()
        size = os.fstat(file).st_size
        start = max(size - LAST_WORDS_BYTES, self._errors_from)
        lines = os.pread(file, max(size - start, 0), start).decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:LAST_WORDS_LETTERS] if lines else ""


def wait_for_messages(children: Sequence[ChildProcess], seconds: float) -> None:
    """Until one of them has sent something or closed its output, or that long."""
    pipes = [child.fileno() for child in children if not child.silent]
    if pipes:
        connection.wait(pipes, seconds)
    else:
        time.sleep(min(seconds, 0.05))  # those that remain are about to end


def _message(line: bytes) -> dict[str, Any] | None:
    """One message; what is none is left out, since user code may get hold of any file descriptor."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _or_raise(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error in it, as the kind of error it was in the child."""
    error = answer.get("error")
    if error is None:
        return answer
    kinds = {kind.exit_code: kind for kind in (RequestError, DoesNotFitError, LostError)}
    raise kinds.get(error["exit_code"], BrimError)(error["message"])
