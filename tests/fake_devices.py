"""What only tests move of a device that is not here: its clock and the host's, and which one is CUDA's current one."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class DeviceClock:
    """The host's clock, a device that is given work, and the marks that are held."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0  # when the device has done all of it
        self.marks = 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds


def fake_device_clock(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, *, stream_type: str | None = None
) -> DeviceClock:
    """The clock that a module and torch's events read; `stream_type`: of the stream that events are recorded on."""
    clock = DeviceClock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            clock.marks += 1

        def __del__(self) -> None:
            clock.marks -= 1

        def record(self, stream: Any = None) -> None:
            assert getattr(stream, "type", None) == stream_type
            self.at = max(clock.free_at, clock.now)

        def query(self) -> bool:
            return self.at <= clock.now

        def synchronize(self) -> None:
            clock.now = max(clock.now, self.at)

        def elapsed_time(self, later: Any) -> float:
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


def fake_current_devices(monkeypatch: pytest.MonkeyPatch, module: str) -> list[torch.device]:
    """The devices that a module has made CUDA's current one, while they are."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def as_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.remove(device)

    monkeypatch.setattr(f"{module}.as_current", as_current)
    return current
