"""How long a device had nothing to do, and what the host was doing meanwhile.

    waits = DeviceWaits(device)
    waits.begin()
    with waits.cause("loading"):
        batch = fetch()
    with waits.busy():              # what is launched inside is the device's work
        step(batch)
    waits.finish()
    waits.fraction(), waits.fractions()

On CUDA a wait is the time between two events of the device's own clock: the end of one piece of work and the beginning
of the next. Work is launched ahead, so what the host does often costs the device nothing. Where it does, the wait is
divided among causes as the host's time between the two launches was. On the CPU the host's time is the device's.
Devices without such events are not measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CAUSES", "DeviceWaits"]

CAUSES = ("loading", "validation", "checkpoint", "search", "other")


@dataclasses.dataclass(frozen=True)
class _Gap:
    """Between two pieces of work, not read from the device yet."""

    end: Any  # events: of the work before,
    start: Any  # and of the work after it
    host_seconds: dict[str, float]  # by cause


class DeviceWaits:
    """Waits of one device in one loop."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._on_cuda = device is not None and device.type == "cuda"
        self._measures = self._on_cuda or (device is not None and device.type == "cpu")
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._began: float | None = None
        self._lasted: float | None = None  # from begin to finish
        self._cause = "other"
        self._since = 0.0  # this cause, unless the device has been given work since
        self._host_seconds: dict[str, float] = {}  # since the last piece of work, by cause
        self._last_end: Any = None  # of the last piece of work; None before the first
        self._gaps: deque[_Gap] = deque()
        self._free: list[Any] = []  # events to be used again

    def begin(self) -> None:
        """The loop starts."""
        self._began = self._since = time.perf_counter()

    def finish(self) -> None:
        """The loop has ended."""
        if self._began is None or self._lasted is not None:
            return
        self._close_gap()
        if self._gaps:
            self._gaps[-1].start.synchronize()
        self._read()
        self._lasted = time.perf_counter() - self._began

    @contextlib.contextmanager
    def cause(self, name: str) -> Iterator[None]:
        """While inside, waiting is because of this; the innermost counts."""
        before = self._cause
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """What is launched inside is work of the device."""
        if self._began is None or not self._measures:
            yield
            return
        self._close_gap()
        try:
            yield
        finally:
            if self._on_cuda:
                with contextlib.suppress(RuntimeError):  # a lost device; the step's own error says so
                    self._last_end = self._recorded()
            self._since = time.perf_counter()

    def fraction(self) -> float | None:
        """Of the loop's time so far, the device's waiting; None where it is not measured."""
        known = self.fractions()
        return None if known is None else min(sum(known.values()), 1.0)

    def fractions(self) -> dict[str, float] | None:
        """The same by cause."""
        if self._began is None or not self._measures:
            return None
        lasted = time.perf_counter() - self._began if self._lasted is None else self._lasted
        return {name: seconds / lasted for name, seconds in self._seconds.items()} if lasted else None

    def _switch(self, name: str) -> None:
        if self._began is None:
            return
        now = time.perf_counter()
        self._host_seconds[self._cause] = self._host_seconds.get(self._cause, 0.0) + now - self._since
        self._cause, self._since = name, now

    def _close_gap(self) -> None:
        """Work is about to be launched, or the loop ends."""
        self._switch(self._cause)
        host, self._host_seconds = self._host_seconds, {}
        if self._last_end is None:
            for name, seconds in host.items():
                self._seconds[name] += seconds
            return
        self._gaps.append(_Gap(self._last_end, self._recorded(), host))
        self._read()

    def _read(self) -> None:
        """The waits whose events the device has reached."""
        while self._gaps and self._gaps[0].start.query():
            gap = self._gaps.popleft()
            waited = max(gap.end.elapsed_time(gap.start), 0.0) / 1000
            whole = sum(gap.host_seconds.values())
            for name, seconds in gap.host_seconds.items():
                self._seconds[name] += waited * seconds / whole if whole else 0.0
            self._free += (gap.end, gap.start)

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
