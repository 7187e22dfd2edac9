"""Idle time between batches, by clocks that only these tests move."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from brim.evaluation import timing
from brim.evaluation.timing import IdleClock


class Clock:
    """The host's clock, a device that is given work, and the marks that are held."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0  # when the device has done all of it
        self.marks = 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            clock.marks += 1

        def __del__(self) -> None:
            clock.marks -= 1

        def record(self) -> None:
            self.at = max(clock.free_at, clock.now)

        def query(self) -> bool:
            return self.at <= clock.now

        def synchronize(self) -> None:
            clock.now = max(clock.now, self.at)

        def elapsed_time(self, later: Any) -> float:
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gaps_between_batches_are_waiting(clock: Clock, device: str) -> None:
    idle = IdleClock(torch.device(device))
    seconds = []
    for gap in (5, 1, 3):  # what is before the first batch does not count
        clock.now += gap
        idle.begin()
        clock.work(2)
        if device == "cpu":
            clock.now += 2
        seconds.append(idle.end())
        assert (idle.wait_fraction() is None) == (len(seconds) == 1)
        clock.now = max(clock.now, clock.free_at)
    clock.now += 7  # nor what comes after the last
    assert [one() for one in seconds] == [2, 2, 2]
    assert idle.wait_fraction() == pytest.approx(4 / 10)


def test_a_device_with_work_ahead_does_not_wait(clock: Clock) -> None:
    idle = IdleClock(torch.device("cuda"))
    for _ in range(4):
        clock.now += 0.5
        idle.begin()
        clock.work(2)
        idle.end()
    assert idle.wait_fraction() == 0


def test_marks_are_dropped_once_they_are_read(clock: Clock) -> None:
    """A pool makes some at every few steps of a run of hours."""
    idle = IdleClock(torch.device("cuda"))
    for _ in range(1000):
        idle.begin()
        clock.work(1)
        idle.end()
        clock.now += 2
    assert clock.marks < 10
    assert idle.wait_fraction() == pytest.approx(0.5, abs=0.01)
