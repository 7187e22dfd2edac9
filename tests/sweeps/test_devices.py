"""Which cards experiments get, and what hides them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.sweeps.devices import local_devices, mps_is_running
from tests.sweeps.sweep_runs import GIB


def cards(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"cuda:{index}", "memory_bytes": 80 * GIB, "card": "H100", **more} for index in range(count)]


def test_without_a_card_there_is_the_machine_and_one_experiment_at_once() -> None:
    (machine,) = local_devices([], environment={})
    assert (machine.name, machine.slots) == ("cpu", 1)
    assert local_devices([], jobs_per_gpu=3, environment={})[0].slots == 3


def test_several_cards_are_each_shown_to_one_child_alone_and_one_card_to_nobody() -> None:
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
