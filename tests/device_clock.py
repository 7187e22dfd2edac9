"""The host's clock and a device's, which only tests move."""

from __future__ import annotations

import types
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
