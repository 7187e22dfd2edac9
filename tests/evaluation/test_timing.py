"""Idle time between batches, by clocks that only these tests move."""

from __future__ import annotations

import pytest
import torch

from brim.evaluation import timing
from brim.evaluation.timing import IdleClock
from tests.fake_devices import DeviceClock, fake_device_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return fake_device_clock(monkeypatch, timing, stream_type="cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gaps_between_batches_are_waiting(clock: DeviceClock, device: str) -> None:
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


def test_a_device_with_work_ahead_does_not_wait(clock: DeviceClock) -> None:
    idle = IdleClock(torch.device("cuda"))
    for _ in range(4):
        clock.now += 0.5
        idle.begin()
        clock.work(2)
        idle.end()
    assert idle.wait_fraction() == 0


def test_marks_are_dropped_once_they_are_read(clock: DeviceClock) -> None:
    """A pool makes some at every few steps of a run of hours."""
    idle = IdleClock(torch.device("cuda"))
    for _ in range(1000):
        idle.begin()
        clock.work(1)
        idle.end()
        clock.now += 2
    assert clock.marks < 10
    assert idle.wait_fraction() == pytest.approx(0.5, abs=0.01)
