"""How many cores a process can count on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.monitor.host import own_cores


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


def test_what_is_told_counts(tmp_path: Path) -> None:
    assert cores(tmp_path, BRIM_CORES="3", LOCAL_WORLD_SIZE="8") == 3
    assert cores(tmp_path, BRIM_CORES="many") == 64


def test_the_real_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= own_cores() <= (os.cpu_count() or 1)
