"""A process that knows torch, asked by one that does not: devices, names of models, forecasts.

    with Scout() as scout:
        scout.check_model("r3d_18")
        scout.forecast(settings, [16, "auto"])

It is started by the first question and ends with the block, so that its memory is free when experiments start.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from brim.errors import LostError, RequestError

__all__ = ["ANSWER_SECONDS", "Scout"]

COMMAND = (sys.executable, "-m", "brim.sweeps.forecast_child")
ANSWER_SECONDS = 180.0  # importing torch, building a large model and tracing it on a busy machine


class Scout:
    """Asks. `card` is what experiments are forecast for.

    {"gpu": name}, {"memory": size}, {"here": true}: this machine's first, or {}: the machine's own memory.
    """

    def __init__(
        self,
        *,
        card: Mapping[str, Any] | None = None,
        timeout_seconds: float = ANSWER_SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.card = dict(card or {})
        self._timeout_seconds = timeout_seconds
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def devices(self) -> list[dict[str, Any]]:
        """The cards that torch sees."""
        found: list[dict[str, Any]] = self._ask({"ask": "devices"}).get("devices", [])
        return found

    def check_model(self, model: str) -> None:
        """A `RequestError` for a model that does not exist."""
        answer = self._ask({"ask": "model", "model": model})
        if "error" in answer:
            raise RequestError(answer["error"])

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        """By the text of each size, its forecast; where there is none, `reason`. Never raises for a model's sake."""
        question = {"ask": "forecast", "settings": settings, "sizes": list(sizes), "card": self.card}
        try:
            return self._ask(question)
        except LostError as error:
            return {"reason": str(error)}

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process.stdout.fileno())
        except (BrokenPipeError, EOFError):
            code = process.wait()
            self._stop()
            raise LostError(f"the forecasting process died (exit code {code})") from None
        except TimeoutError:
            self._stop()
            raise LostError(f"the forecasting process gave no answer within {self._timeout_seconds:g} s") from None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, pipe: int) -> bytes:
        deadline = time.monotonic() + self._timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                chunk = os.read(pipe, 65536)
                if not chunk:
                    raise EOFError
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._pending = b""
            self._process = subprocess.Popen(
                list(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
