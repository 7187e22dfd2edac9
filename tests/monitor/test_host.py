""""""

from __future__ import annotations

import collections
import gc
import mmap
import os
import time
import types
from pathlib import Path

import psutil
import pytest

from brim.monitor.host import CpuMeter, MemoryMeter, available_host_bytes, own_cores, process_resident_bytes

MIB = 2**20
HOST_AVAILABLE = 64 * 1024 * MIB


@pytest.fixture(autouse=True)
def _host_with_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=HOST_AVAILABLE))


def write_v2(folder: Path, *, limit: str | int, current: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file 999\ninactive_file {inactive_file}\n")


def write_v1(folder: Path, *, limit: int, usage: int, total_inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {total_inactive_file}\n")


def room(tmp_path: Path, groups: str = "0::/\n") -> int:
    own = tmp_path / "own_groups"
    own.write_text(groups)
    return available_host_bytes(tmp_path / "cgroup", own)


def test_without_a_control_group_the_host_decides(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path / "absent", tmp_path / "absent_too") == HOST_AVAILABLE


def test_version_2_limit_bounds_the_host_and_gives_back_inactive_files(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=1000 * MIB, current=600 * MIB, inactive_file=100 * MIB)
    assert room(tmp_path) == 500 * MIB


def test_version_1_limit_bounds_the_host_and_gives_back_inactive_files(tmp_path: Path) -> None:
    write_v1(tmp_path / "cgroup" / "memory", limit=1000 * MIB, usage=600 * MIB, total_inactive_file=100 * MIB)
    assert room(tmp_path, "4:memory:/\n") == 500 * MIB


def test_no_limit_in_version_2_is_the_word_max(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit="max", current=600 * MIB)
    assert room(tmp_path) == HOST_AVAILABLE


def test_no_limit_in_version_1_is_a_huge_number(tmp_path: Path) -> None:
    write_v1(tmp_path / "cgroup" / "memory", limit=9223372036854771712, usage=600 * MIB)
    assert room(tmp_path, "4:memory:/\n") == HOST_AVAILABLE


def test_a_limit_above_the_host_does_not_raise_the_figure(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=2 * HOST_AVAILABLE, current=0)
    assert room(tmp_path) == HOST_AVAILABLE


def test_the_group_of_this_process_counts(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup" / "jobs" / "12", limit=300 * MIB, current=100 * MIB)
    write_v2(tmp_path / "cgroup" / "jobs" / "13", limit=10 * MIB, current=0)  # somebody else's
    assert room(tmp_path, "0::/jobs/12\n") == 200 * MIB


def test_a_tighter_group_above_binds_too(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup" / "jobs" / "12", limit=900 * MIB, current=100 * MIB)
    write_v2(tmp_path / "cgroup" / "jobs", limit=1000 * MIB, current=950 * MIB)
    assert room(tmp_path, "0::/jobs/12\n") == 50 * MIB


def test_version_1_finds_its_controller_among_several(tmp_path: Path) -> None:
    write_v1(tmp_path / "cgroup" / "memory" / "slurm" / "job_5", limit=300 * MIB, usage=100 * MIB)
    groups = "9:name=systemd:/elsewhere\n4:hugetlb,memory:/slurm/job_5\n0::/\n"
    assert room(tmp_path, groups) == 200 * MIB


def test_a_group_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    write_v1(tmp_path / "cgroup" / "memory", limit=300 * MIB, usage=100 * MIB)
    assert room(tmp_path, "4:memory:/docker/0123abcd\n") == 200 * MIB


def test_a_group_outside_the_namespace_is_not_followed(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=300 * MIB, current=100 * MIB)
    write_v2(tmp_path / "neighbour", limit=10 * MIB, current=0)
    assert room(tmp_path, "0::/../neighbour\n") == 200 * MIB


def test_a_control_group_over_its_limit_has_no_free_memory(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=100 * MIB, current=150 * MIB)
    assert room(tmp_path) == 0


def test_inactive_files_never_give_more_than_the_limit(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=100 * MIB, current=10 * MIB, inactive_file=50 * MIB)
    assert room(tmp_path) == 100 * MIB


def test_unreadable_figures_leave_the_host_to_decide(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit="what?", current=0)
    assert room(tmp_path) == HOST_AVAILABLE


def test_a_limit_without_statistics_counts_all_use(tmp_path: Path) -> None:
    write_v2(tmp_path / "cgroup", limit=100 * MIB, current=60 * MIB, inactive_file=50 * MIB)
    (tmp_path / "cgroup" / "memory.stat").unlink()
    assert room(tmp_path) == 40 * MIB


def test_a_meter_tracks_the_free_memory_within_a_limit(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    write_v2(group, limit=1000 * MIB, current=600 * MIB)
    meter = MemoryMeter(group, tmp_path / "absent")
    readings = [meter.available_bytes()]
    write_v2(group, limit=1000 * MIB, current=900 * MIB, inactive_file=50 * MIB)
    readings.append(meter.available_bytes())
    write_v2(group, limit="max", current=900 * MIB)
    readings.append(meter.available_bytes())
    assert readings == [400 * MIB, 150 * MIB, HOST_AVAILABLE]


def test_the_real_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total


def test_resident_bytes_grow_with_memory_that_is_touched() -> None:
    gc.collect()  # what other tests have left behind is not to be given back in between
    before = process_resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as held:  # fresh pages: a plain allocation may reuse what is resident already
        held.write(b"x" * (64 * MIB))
        assert process_resident_bytes() - before > 32 * MIB


CpuTimes = collections.namedtuple("CpuTimes", "user nice system idle iowait guest guest_nice")


def set_cpu_times(monkeypatch: pytest.MonkeyPatch, *readings: tuple[float, ...]) -> None:
    remaining = iter([CpuTimes(*reading) for reading in readings])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(remaining))


def test_cores_are_busy_for_the_share_of_time_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_times(monkeypatch, (100, 0, 10, 50, 0, 0, 0), (102, 0, 11, 56, 1, 0, 0), (106, 0, 11, 56, 1, 0, 0))
    meter = CpuMeter()
    assert meter.fraction() is None  # nothing to compare with
    assert meter.fraction() == pytest.approx(0.3)  # 3 busy of 10 seconds: waiting for disks is not work
    assert meter.fraction() == pytest.approx(1.0)


def test_the_time_of_guests_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_times(monkeypatch, (0, 0, 0, 0, 0, 0, 0), (4, 0, 0, 6, 0, 4, 0))
    meter = CpuMeter()
    meter.fraction()
    assert meter.fraction() == pytest.approx(0.4)


def test_a_clock_that_has_not_ticked_gives_no_share_and_keeps_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    still, later = (1, 0, 0, 1, 0, 0, 0), (2, 0, 0, 4, 0, 0, 0)
    set_cpu_times(monkeypatch, still, still, later)
    meter = CpuMeter()
    assert [meter.fraction(), meter.fraction(), meter.fraction()] == [None, None, pytest.approx(0.25)]


def test_two_meters_do_not_share_their_past(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_times(monkeypatch, (0, 0, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0, 0, 0), (1, 0, 0, 3, 0, 0, 0))
    first, second = CpuMeter(), CpuMeter()
    first.fraction()
    second.fraction()
    assert first.fraction() == pytest.approx(0.25)


def test_the_real_cores_are_between_idle_and_full() -> None:
    meter = CpuMeter()
    meter.fraction()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    fraction = meter.fraction()
    assert fraction is not None
    assert 0 < fraction <= 1


@pytest.fixture(autouse=True)
def _machine_with_64_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def cores(tmp_path: Path, groups: str = "0::/\n", **environment: str) -> int:
    own = tmp_path / "own_groups"
    own.write_text(groups)
    return own_cores(environment, tmp_path / "cgroup", own)


def write(folder: Path, **figures: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    assert cores(tmp_path) == 64


@pytest.mark.parametrize(("quota", "count"), [("400000 100000", 4), ("50000 100000", 1), ("max 100000", 64), ("?", 64)])
def test_a_container_has_the_time_of_some_cores(tmp_path: Path, quota: str, count: int) -> None:
    write(tmp_path / "cgroup" / "pod", cpu__max=quota)
    assert cores(tmp_path, "0::/pod\n") == count


def test_the_tightest_group_above_binds(tmp_path: Path) -> None:
    write(tmp_path / "cgroup" / "jobs", cpu__max="800000 100000")
    write(tmp_path / "cgroup" / "jobs" / "12", cpu__max="max 100000")
    assert cores(tmp_path, "0::/jobs/12\n") == 8


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1_has_a_quota_of_a_period(tmp_path: Path, mount: str) -> None:
    group = tmp_path / "cgroup" / mount / "docker"
    write(group, cpu__cfs_quota_us="600000", cpu__cfs_period_us="100000")
    assert cores(tmp_path, "3:cpu,cpuacct:/docker\n") == 6
    write(group, cpu__cfs_quota_us="-1")
    assert cores(tmp_path, "3:cpu,cpuacct:/docker\n") == 64


def test_ranks_on_one_machine_share_it(tmp_path: Path) -> None:
    assert cores(tmp_path, LOCAL_WORLD_SIZE="8") == 8
    assert cores(tmp_path, LOCAL_WORLD_SIZE="100") == 1


def test_a_number_that_was_set_counts(tmp_path: Path) -> None:
    assert cores(tmp_path, BRIM_CORES="3", LOCAL_WORLD_SIZE="8") == 3
    assert cores(tmp_path, BRIM_CORES="many") == 64


def test_the_real_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= own_cores() <= (os.cpu_count() or 1)
