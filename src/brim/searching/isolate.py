"""Probing in a child process, so that a fatal error, a kill or a hang is a verdict and not the end.

The child builds the workload from an importable factory and JSON, so nothing is pickled. When it dies, the
reason becomes the probe's verdict, and the next probe starts a new child.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

from brim.errors import BrimError, DoesNotFitError, LostError, RequestError
from brim.memory.failures import FailureKind, classify_exit
from brim.records import Probe, Verdict
from brim.searching.probe import Prober, ProbeSettings, WorkloadError
from brim.sizing.probing import ProbeContext

__all__ = ["IsolatedProber"]

DEFAULT_PROBE_SECONDS = 600.0
START_SECONDS = 600.0  # importing torch and building a large model on a busy machine


class IsolatedProber(Prober):
    """Probes a workload in a child process.

    `factory` is `module:function`; the child calls it with `data` and probes the workload it returns.
    """

    def __init__(self, factory: str, data: Mapping[str, Any], settings: ProbeSettings) -> None:
        self.settings = settings
        self._start_message = {
            "factory": factory,
            "data": dict(data),
            "settings": dataclasses.asdict(dataclasses.replace(settings, timeout_seconds=None)),
        }
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def probe(self, size: int) -> Probe:
        """Try one size in the child; its death or silence is a verdict."""
        if self._child is None:
            self._start()
        limit = self.settings.timeout_seconds or DEFAULT_PROBE_SECONDS
        try:
            answer = self._ask({"size": size}, seconds=limit)
        except TimeoutError:
            self._stop()
            return Probe(batch_size=size, verdict="timeout", detail=f"no answer within {limit:g} s; ended")
        except EOFError:
            return self._death(size)
        if "fatal" in answer:
            self._stop()
            return Probe(batch_size=size, verdict="fatal", detail=str(answer["fatal"]))
        return Probe.from_json(_or_raise(answer)["probe"])

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 — closed by _stop
        self._child = subprocess.Popen(
            [sys.executable, "-m", "brim.searching.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        try:
            answer = self._ask(self._start_message, seconds=START_SECONDS)
        except TimeoutError:
            self._stop()
            raise LostError(f"the probing process was not ready within {START_SECONDS:g} s") from None
        except EOFError:
            why = self._death(0).detail
            raise LostError(f"the probing process died while it built the workload: {why}") from None
        try:
            self.context = ProbeContext(**_or_raise(answer)["context"])
        except BrimError:
            self._stop()
            raise

    def _ask(self, message: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """Send one line and read one; `TimeoutError` when none comes in time, `EOFError` when the child is gone."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = os.read(child.stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self, size: int) -> Probe:
        assert self._child is not None
        code = self._child.wait()
        last_words = self._last_words()
        self._stop()
        failure = classify_exit(code)
        verdict: Verdict = "oom" if failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY else "fatal"
        reason = failure.reason if failure is not None else "the process ended by itself"
        return Probe(batch_size=size, verdict=verdict, detail=f"{reason}{last_words}")

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors.tell() - 4096, 0))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"; it last wrote: {lines[-1].strip()[:200]}" if lines else ""

    def _stop(self) -> None:
        """End the child that this prober started, and its own children, at once."""
        child, self._child, self._pending = self._child, None, b""
        if child is not None:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _or_raise(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error in it, as the kind of error it was in the child."""
    error = answer.get("error")
    if error is None:
        return answer
    if error.get("by_workload"):
        raise WorkloadError(error["message"])
    kinds = {kind.exit_code: kind for kind in (RequestError, DoesNotFitError, LostError)}
    raise kinds.get(error["exit_code"], BrimError)(error["message"])
