"""The loggers that were asked for, as one. Offline by default, files in the run's folder.

    with open_loggers(["tensorboard"], folder, note) as loggers, loggers.open_run("seed-0", {"epochs": 3}) as run:
        run.log({"loss": 0.5}, step=1)
        run.summary = {"metrics": {"top1": 0.9}}

A library that is missing is a `RequestError` before anything runs. A logger that fails later is noted once and called
no more; the note is also in the record of the run. No run ends for it or waits for it, since each logger is called in
a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import RequestError
from brim.monitor.loggers.base import EndedRun, Logger, Parameter, RunLog
from brim.settings.caller import given
from brim.storage.run_folder import add_notes

__all__ = ["LoggedRun", "Loggers", "check_loggers", "open_loggers"]

END_SECONDS = 60.0  # for a logger to send what is left, once everything is done
# Kept out of the import: a library is loaded by the one file that uses it.
_CLASSES = {
    "tensorboard": "tensorboard_logger:TensorBoardLogger",
    "mlflow": "mlflow_logger:MlflowLogger",
    "wandb": "wandb_logger:WandbLogger",
}


class _Thread:
    """One logger in a thread of its own, which makes the calls in order; after a failure it drops the rest."""

    def __init__(self, name: str, logger: Logger) -> None:
        self.name, self.logger = name, logger
        self.failure = ""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"brim-log-{name}", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], None]) -> None:
        self._calls.put(work)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive() and not self.failure:
            self.failure = f"no answer for {END_SECONDS:.0f} s"

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            if self.failure:
                continue
            try:
                work()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"


class LoggedRun:
    """One run in every logger; as a context manager it ends with `summary`, or with the error that left the block."""

    def __init__(self, loggers: Loggers, name: str, parameters: Mapping[str, Parameter]) -> None:
        self.summary: Mapping[str, Any] = {}
        self._loggers = loggers
        self._logs: dict[str, RunLog] = {}
        loggers.call_each(lambda thread: self._logs.update({thread.name: thread.logger.open_run(name, parameters)}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end({"summary": self.summary})
        else:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.end({"summary": self.summary}, state=state, failure=type(error).__name__, error=str(error))

    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        """Figures at a step; what is not a finite number is left out."""
        plain = _numbers(figures)
        if plain:
            self._loggers.call_each(lambda thread: self._logs[thread.name].log(plain, step))

    def end(self, summary: Mapping[str, Any], *, state: str = "completed", failure: str = "", error: str = "") -> None:
        """The numbers of a summary, nested ones under dotted keys."""
        ended = EndedRun(figures=_numbers(summary), state=state, failure=failure, error=error)
        self._loggers.call_each(lambda thread: self._logs[thread.name].end(ended))


class Loggers:
    """Every logger that has not failed."""

    def __init__(self, members: Mapping[str, Logger], note: Callable[[str], None]) -> None:
        self._threads = [_Thread(name, logger) for name, logger in members.items()]
        self._note = note
        self.notes: list[str] = []  # a failure each

    def __bool__(self) -> bool:
        return bool(self._threads)

    def open_run(self, name: str, parameters: Mapping[str, Any]) -> LoggedRun:
        """A run begins; its parameters may be nested."""
        plain = {
            key: value if isinstance(value, (int, float, str, bool)) else str(value)
            for key, value in _leaves(parameters)
        }
        return LoggedRun(self, name, plain)

    def call_each(self, work: Callable[[_Thread], None]) -> None:
        """Queue a call of every logger; failures of earlier calls are noted here, in the caller's own thread."""
        self._drop_failed()
        for thread in self._threads:
            thread.call(lambda thread=thread: work(thread))  # type: ignore[misc]

    def close(self) -> None:
        """Wait until everything is written."""
        for thread in self._threads:
            thread.close()
        self._drop_failed()
        self._threads = []

    def _drop_failed(self) -> None:
        for thread in [thread for thread in self._threads if thread.failure]:
            self._threads.remove(thread)
            self.notes.append(f"{given('log', thread.name)}: {thread.failure}; nothing more is logged there")
            self._note(self.notes[-1])


@contextlib.contextmanager
def open_loggers(names: Sequence[str], folder: Path, note: Callable[[str], None]) -> Iterator[Loggers]:
    """The loggers of these names, until everything is written; a `RequestError` for one that is not installed."""
    loggers = Loggers({name: _made(name, folder) for name in dict.fromkeys(names)}, note)
    try:
        yield loggers
    finally:
        loggers.close()
    add_notes(folder, loggers.notes)  # a logger may fail at the very end, when the record is written already


def check_loggers(names: Sequence[str], folder: Path) -> None:
    """A `RequestError` for one that is not installed; for those who open them later, or on rank 0 alone."""
    for name in names:
        _made(name, folder)


def _made(name: str, folder: Path) -> Logger:
    file, _, of = _CLASSES[name].partition(":")
    made: type[Logger] = getattr(importlib.import_module(f"brim.monitor.loggers.{file}"), of)
    try:
        return made(folder)
    except ImportError as error:
        raise RequestError(
            f"{given('log', name)}: {name} is not installed here ({error}): pip install 'brim[{made.extra}]'"
        ) from error


def _leaves(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; unlike in files of settings, any key will do."""
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in _leaves(figures)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
