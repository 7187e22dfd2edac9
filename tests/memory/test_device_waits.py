"""Idle time of a device and its causes, by clocks that only these tests move."""

from __future__ import annotations

import pytest
import torch

from brim.memory import device_waits
from brim.memory.device_waits import CAUSES, DeviceWaits
from tests.fake_devices import DeviceClock, fake_device_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return fake_device_clock(monkeypatch, device_waits, stream_type="cuda")


def test_on_the_cpu_all_that_is_no_work_is_waiting(clock: DeviceClock) -> None:
    waits = DeviceWaits(torch.device("cpu"))
    assert waits.fraction() is None
    waits.begin()
    with waits.cause("loading"):
        clock.now += 1
    with waits.busy():
        clock.now += 4
    with waits.cause("validation"):
        clock.now += 1
        with waits.cause("checkpoint"):
            clock.now += 2
        with waits.busy():
            clock.now += 1
    clock.now += 1
    waits.finish()
    clock.now += 50
    found = waits.fractions()
    assert found == pytest.approx({"loading": 0.1, "validation": 0.1, "checkpoint": 0.2, "search": 0.0, "other": 0.1})
    assert waits.fraction() == pytest.approx(0.5)
    assert tuple(found or ()) == CAUSES


def test_on_cuda_what_the_host_does_ahead_costs_nothing(clock: DeviceClock) -> None:
    waits = DeviceWaits(torch.device("cuda"))
    waits.begin()
    for _ in range(5):  # launched in no time, each takes a second: the device is always behind
        with waits.busy():
            clock.work(1.0)
        with waits.cause("loading"):
            clock.now += 0.5
    waits.finish()
    assert clock.now == 105.0
    assert waits.fraction() == 0


def test_on_cuda_a_wait_is_divided_as_the_hosts_time_was(clock: DeviceClock) -> None:
    waits = DeviceWaits(torch.device("cuda"))
    waits.begin()
    with waits.busy():
        clock.work(2.0)
    with waits.cause("validation"):
        clock.now += 3.0
    with waits.cause("checkpoint"):
        clock.now += 1.0
    with waits.busy():  # the device has waited for two of the host's four seconds
        clock.work(6.0)
    waits.finish()
    assert waits.fractions() == pytest.approx(
        {"loading": 0, "validation": 0.15, "checkpoint": 0.05, "search": 0, "other": 0}
    )


def test_events_are_used_again(clock: DeviceClock) -> None:
    waits = DeviceWaits(torch.device("cuda"))
    waits.begin()
    for _ in range(1000):
        with waits.busy():
            clock.work(0.001)
        clock.now += 0.002
    assert len(waits._gaps) + len(waits._free) < 10


def test_a_device_without_such_events_is_not_measured() -> None:
    waits = DeviceWaits(torch.device("mps"))
    waits.begin()
    with waits.busy(), waits.cause("loading"):
        pass
    waits.finish()
    assert waits.fraction() is None
    assert waits.fractions() is None
