"""Packing: reserved bytes decide, every device is used, nobody waits for ever; and whether sharing pays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.sweeps.scheduler import (
    MOST_OVERTAKES,
    SETTLE_SECONDS,
    Device,
    Need,
    Packing,
    ThroughputWatch,
    local_devices,
    mps_is_running,
)
from tests.sweeps.sweep_runs import GIB


def card(index: int = 0, *, gib: int = 80, slots: int = 8) -> Device:
    return Device(name=f"cuda:{index}", memory_bytes=gib * GIB, slots=slots)


def fill(packing: Packing, needs: list[Need]) -> list[tuple[str, str]]:
    """Start all that can be started; gives who went where."""
    waiting, started = list(needs), []
    while waiting:
        chosen = packing.choose(waiting)
        if chosen is None:
            return started
        need, device = chosen
        place = waiting.index(need)
        packing.start(need, device, before=waiting[:place])
        waiting.pop(place)
        started.append((need.id, device.name))
    return started


def test_experiments_share_a_card_as_far_as_their_reserved_bytes_go() -> None:
    packing = Packing([card(gib=80)])
    needs = [Need(id=str(number), bytes=30 * GIB) for number in range(4)]
    assert fill(packing, needs) == [("0", "cuda:0"), ("1", "cuda:0")]
    packing.end("0")
    assert fill(packing, needs[2:]) == [("2", "cuda:0")]


def test_empty_cards_come_first() -> None:
    packing = Packing([card(0), card(1), card(2)])
    started = fill(packing, [Need(id=str(number), bytes=GIB) for number in range(5)])
    assert [device for _, device in started[:3]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert len(started) == 5


def test_an_unknown_need_has_a_card_for_itself() -> None:
    packing = Packing([card()])
    assert fill(packing, [Need(id="a"), Need(id="b", bytes=GIB)]) == [("a", "cuda:0")]
    packing = Packing([card()])
    assert fill(packing, [Need(id="a", bytes=GIB), Need(id="b")]) == [("a", "cuda:0")]


def test_jobs_per_gpu_shares_unknown_needs_in_equal_parts() -> None:
    packing = Packing([card(slots=3)], shares=True)
    assert len(fill(packing, [Need(id=str(number)) for number in range(5)])) == 3


def test_one_that_must_be_alone_is_alone() -> None:
    packing = Packing([card()])
    assert fill(packing, [Need(id="a", bytes=GIB, alone=True), Need(id="b", bytes=GIB)]) == [("a", "cuda:0")]
    packing.end("a")
    assert fill(packing, [Need(id="b", bytes=GIB), Need(id="c", bytes=GIB, alone=True)]) == [("b", "cuda:0")]


def test_what_is_larger_than_any_card_is_tried_alone() -> None:
    packing = Packing([card(gib=24)])
    assert fill(packing, [Need(id="a", bytes=40 * GIB), Need(id="b", bytes=GIB)]) == [("a", "cuda:0")]
    assert packing.reserved_bytes("cuda:0") == 24 * GIB


def test_only_experiments_that_share_a_card_get_a_memory_limit() -> None:
    packing = Packing([card(gib=24)])
    device = packing.devices[0]
    assert packing.start(Need(id="a", bytes=5 * GIB), device) == 5 * GIB
    packing.end("a")
    assert packing.start(Need(id="a", bytes=5 * GIB, alone=True), device) is None
    packing.end("a")
    assert packing.start(Need(id="a"), device) is None


def test_small_ones_overtake_a_large_one_only_so_often() -> None:
    packing = Packing([card(gib=80, slots=64)])
    packing.start(Need(id="first", bytes=20 * GIB), packing.devices[0])
    large = Need(id="large", bytes=70 * GIB)
    small = [Need(id=str(number), bytes=GIB) for number in range(20)]
    assert len(fill(packing, [large, *small])) == MOST_OVERTAKES


def test_experiments_run_where_they_ask_to() -> None:
    cpu = Device(name="cpu")
    packing = Packing([card(0), card(1), cpu])
    needs = [Need(id="a", device="cpu"), Need(id="b", device="cuda:1", bytes=GIB), Need(id="c", device="cuda", bytes=1)]
    assert dict(fill(packing, needs)) == {"a": "cpu", "b": "cuda:1", "c": "cuda:0"}
    assert Packing([card(0), cpu]).choose([Need(id="d")]) == (Need(id="d"), card(0))
    assert Packing([cpu]).choose([Need(id="d")]) == (Need(id="d"), cpu)


@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=30),
    st.integers(1, 3),
    st.integers(1, 5),
    st.randoms(),
)
def test_nothing_is_ever_reserved_twice_and_everything_ends(
    asked: list[tuple[int, bool]], cards: int, slots: int, random: object
) -> None:
    devices = [card(index, slots=slots) for index in range(cards)]
    packing = Packing(devices)
    waiting = [Need(id=str(place), bytes=gib * GIB, alone=alone) for place, (gib, alone) in enumerate(asked)]
    running: list[str] = []
    while waiting or running:
        started = fill(packing, waiting)
        names = {name for name, _ in started}
        waiting = [need for need in waiting if need.id not in names]
        running += [name for name, _ in started]
        for device in devices:
            assert packing.reserved_bytes(device.name) <= device.memory_bytes
            assert packing.running(device.name) <= slots
        assert running, "something always runs"
        packing.end(running.pop(random.randrange(len(running))))


def heard(watch: ThroughputWatch, rates: dict[str, float], now: float) -> list[int | None]:
    return [watch.add_rate("cuda:0", name, rate, now) for _ in range(3) for name, rate in rates.items()]


def test_a_second_experiment_that_halves_the_first_brings_nothing() -> None:
    watch = ThroughputWatch()
    watch.changed("cuda:0", 1, 0.0)
    heard(watch, {"a": 100.0}, SETTLE_SECONDS + 1)
    watch.changed("cuda:0", 2, 100.0)
    assert set(heard(watch, {"a": 51.0, "b": 7.0}, 101.0)) == {None}, "not before things have settled"
    assert heard(watch, {"a": 51.0, "b": 7.0}, 100.0 + SETTLE_SECONDS + 1)[-1] == 1


def test_a_second_experiment_is_kept_if_the_first_keeps_most_of_its_rate() -> None:
    watch = ThroughputWatch()
    watch.changed("cuda:0", 1, 0.0)
    heard(watch, {"a": 100.0}, SETTLE_SECONDS + 1)
    watch.changed("cuda:0", 2, 100.0)
    assert set(heard(watch, {"a": 80.0, "b": 7.0}, 110.0)) == {None}


def test_the_end_of_an_experiment_reports_as_much_as_its_start() -> None:
    watch = ThroughputWatch()
    watch.changed("cuda:0", 3, 0.0)
    heard(watch, {"a": 33.0, "b": 20.0, "c": 5.0}, 10.0)
    watch.changed("cuda:0", 2, 20.0)
    assert heard(watch, {"a": 50.0, "b": 30.0}, 30.0)[-1] == 2


def test_a_limit_lets_what_runs_run() -> None:
    packing = Packing([card()])
    needs = [Need(id=str(number), bytes=GIB) for number in range(6)]
    fill(packing, needs[:3])
    packing.limit("cuda:0", 2)
    assert packing.running("cuda:0") == 3
    assert fill(packing, needs[3:]) == []
    packing.end("0")
    packing.end("1")
    assert fill(packing, needs[3:]) == [("3", "cuda:0")]


def cards(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"cuda:{index}", "memory_bytes": 80 * GIB, "card": "H100", **more} for index in range(count)]


def test_without_a_card_there_is_the_machine_and_one_experiment_at_once() -> None:
    (machine,) = local_devices([], environment={})
    assert (machine.name, machine.slots) == ("cpu", 1)
    assert local_devices([], jobs_per_gpu=3, environment={})[0].slots == 3


def test_each_child_sees_one_of_several_cards() -> None:
    assert [one.visible for one in local_devices(cards(2), environment={})] == ["0", "1", None]
    assert [one.visible for one in local_devices(cards(1), environment={})] == [None, None]


def test_cards_that_the_environment_hides_stay_hidden() -> None:
    found = local_devices(cards(2), environment={"CUDA_VISIBLE_DEVICES": "3, GPU-77"})
    assert [one.visible for one in found] == ["3", "GPU-77", None]


def test_the_files_device_ids_choose_among_them() -> None:
    found = local_devices(cards(4), device_ids=[2, 0], environment={})
    assert [one.name for one in found] == ["cuda:2", "cuda:0", "cpu"]
    with pytest.raises(RequestError, match=r"gpu\.device_ids 4: here are 4 GPUs"):
        local_devices(cards(4), device_ids=[4], environment={})
    with pytest.raises(RequestError, match="each GPU once"):
        local_devices(cards(4), device_ids=[1, 1], environment={})


def test_what_others_hold_of_a_card_is_not_reserved() -> None:
    free, taken = (local_devices(cards(1, used_bytes=used), environment={})[0] for used in (0, 10 * GIB))
    assert free.memory_bytes is not None
    assert taken.memory_bytes == free.memory_bytes - 10 * GIB
    assert free.memory_bytes < 80 * GIB


def test_mps_is_seen_by_its_control_pipe_and_a_dead_daemon_is_none(tmp_path: Path) -> None:
    surroundings = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_is_running(surroundings)
    (tmp_path / "control").touch()
    assert mps_is_running(surroundings)
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert mps_is_running(surroundings)
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("999999999")
    assert not mps_is_running(surroundings)
