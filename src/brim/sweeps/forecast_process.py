"""A process that knows torch, asked by one that does not: devices, names of models, forecasts.

    with ForecastProcess() as forecaster:
        forecaster.check_model("r3d_18")
        forecaster.forecast(settings, [16, "auto"])

It is started by the first question and ends with the block, so that its memory is free when experiments start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from brim.errors import BrimError, first_line
from brim.running.child_process import ChildLostError, ChildProcess, child_command

__all__ = ["ANSWER_SECONDS", "ForecastProcess"]

COMMAND = child_command("brim.sweeps.forecast_server:serve_forecasts")
ANSWER_SECONDS = 180.0  # importing torch, building a large model and tracing it on a busy machine


class ForecastProcess:
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
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def devices(self) -> list[dict[str, Any]]:
        """The cards that torch sees."""
        found: list[dict[str, Any]] = self._ask({"ask": "devices"})["devices"]
        return found

    def check_model(self, model: str) -> None:
        """A `RequestError` for a model that does not exist."""
        self._ask({"ask": "model", "model": model})

    def forecast(self, settings: Mapping[str, Any], sizes: Sequence[int | str]) -> dict[str, Any]:
        """By the text of each size, its forecast; where there is none, `reason`. Never raises for a model's sake."""
        question = {"ask": "forecast", "settings": settings, "sizes": list(sizes), "card": self.card}
        try:
            return self._ask(question)
        except BrimError as error:
            return {"reason": first_line(error)}

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._child = child = self._child or ChildProcess(self._command, name="the forecasting process")
        try:
            return child.ask(question, seconds=self._timeout_seconds)
        except ChildLostError:
            self._stop()  # the next question starts another
            raise

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
