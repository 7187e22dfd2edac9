"""Probing in a child process, so that a fatal error, a kill or a hang is a verdict and not the end.

The child builds the workload from an importable factory and JSON, so nothing is pickled. When it dies, the
reason becomes the probe's verdict, and the next probe starts a new child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from brim.errors import BrimError, LostError, RequestError, first_line
from brim.memory.weights import load_failure
from brim.records import Probe, Verdict
from brim.running.child_main import Send
from brim.running.child_process import ChildLostError, ChildProcess, child_command
from brim.searching.probe import DeviceProber, Prober, ProbeSettings, WorkloadError, raised_by
from brim.sizing.probing import ProbeContext

__all__ = ["IsolatedProber", "serve_probes"]

DEFAULT_PROBE_SECONDS = 600.0
START_SECONDS = 600.0  # importing torch and building a large model on a busy machine
VERDICTS: dict[str, Verdict] = {"out_of_memory": "oom", "timeout": "timeout", "killed": "fatal"}  # by a child's end


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
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def probe(self, size: int) -> Probe:
        """Try one size in the child; its death or silence is a verdict."""
        child = self._child or self._start()
        try:
            answer = child.ask({"size": size}, seconds=self.settings.timeout_seconds or DEFAULT_PROBE_SECONDS)
        except ChildLostError as error:
            self._stop()
            return Probe(batch_size=size, verdict=VERDICTS[error.ending.kind], detail=error.ending.reason)
        if "fatal" in answer:
            self._stop()
            return Probe(batch_size=size, verdict="fatal", detail=answer["fatal"])
        if "workload_error" in answer:
            raise WorkloadError(answer["workload_error"])
        return Probe.from_json(answer["probe"])

    def _start(self) -> ChildProcess:
        command = child_command(f"{__name__}:{serve_probes.__name__}")
        self._child = child = ChildProcess(command, name="the process that builds the workload")
        try:
            self.context = ProbeContext(**child.ask(self._start_message, seconds=START_SECONDS)["context"])
        except BrimError:
            self._stop()
            raise
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def serve_probes(requests: Iterator[dict[str, Any]], send: Send) -> None:
    """In the child: build the workload that the first request names, then probe every size asked for."""
    first = next(requests)
    module, _, function = first["factory"].partition(":")
    with contextlib.ExitStack() as stack:
        try:
            workload = getattr(importlib.import_module(module), function)(first["data"])
            prober = DeviceProber(workload, ProbeSettings(**first["settings"]), preserve_state=False)
            stack.enter_context(prober)
        except BrimError:
            raise
        except Exception as error:
            full = load_failure(error, None, what="outside of any batch")
            words = f"building the workload raised {type(error).__name__}: {error}"
            raise full or RequestError(words) from error
        send({"context": dataclasses.asdict(prober.context)})
        for request in requests:
            _answer(prober, request["size"], send)


def _answer(prober: DeviceProber, size: int, send: Send) -> None:
    try:
        probe = prober.probe(size)
    except LostError as error:
        send({"fatal": first_line(error.__cause__ or error)})
        os._exit(LostError.exit_code)  # the device is unusable: even tearing down could hang
    except BrimError:
        raise
    except Exception as error:  # the workload's own, at this size; another size may run
        send({"workload_error": raised_by(prober.stage, error)})
    else:
        send({"probe": probe.to_json()})
