"""The host: memory that a process can take, what this one holds, how many cores it may use, and how busy they are.

A container with four cores' worth of time on a machine of 64 may run on all 64, and is stopped for most of every tenth
of a second when it does; `own_cores` counts what control groups, torchrun's ranks and sweeps leave.

Unlike `psutil.virtual_memory().available`, the memory also respects the limit of the container or batch job the
process runs in (Linux control groups, both versions). It knows nothing of devices.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import psutil

__all__ = [
    "CORES_VARIABLE", "CpuMeter", "MemoryMeter", "available_host_bytes", "free_shared_bytes", "group_cores",
    "group_limit_bytes", "own_cores", "process_resident_bytes",
]  # fmt: skip

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def binding_groups(root: Path, own_groups: Path, *, controller: str, mount: str) -> Iterator[Path]:
    """Folders of every group whose limit applies: a group is bound by its own and by those of all above it.

    Version 2 has one hierarchy, mounted at the root itself, and names no controller.
    """
    group = _own_group(own_groups, controller)
    # Inside a container the path may be the host's and not exist here; its own group is then the mount itself.
    for folder in (group, *group.parents):
        yield root / mount / folder


def read_text(path: Path) -> str:
    """The text of a file; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read_number(text: str) -> int | None:
    """A whole number; None for "max", "-1" and what is no number."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _own_group(own_groups: Path, controller: str) -> PurePosixPath:
    """This process's group relative to the mount, from lines such as `4:cpu,memory:/jobs/12` or `0::/jobs/12`."""
    for line in read_text(own_groups).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(","):
            group = PurePosixPath(fields[2].lstrip("/"))
            return PurePosixPath() if ".." in group.parts else group  # outside this namespace: not to be seen here
    return PurePosixPath()


CORES_VARIABLE = "BRIM_CORES"  # a sweep sets it for experiments that share a device; anybody may
RANKS_VARIABLE = "LOCAL_WORLD_SIZE"  # torchrun: processes on this machine


def own_cores(
    environment: Mapping[str, str] | None = None, cgroup_root: Path = ROOT, own_groups: Path = OWN_GROUPS
) -> int:
    """Cores for this process, one at least: those it may run on and has time on, shared with the other ranks here."""
    variables = os.environ if environment is None else environment
    asked = read_number(variables.get(CORES_VARIABLE, ""))
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    allowed = min(cores, group_cores(cgroup_root, own_groups))
    return max(int(allowed / (read_number(variables.get(RANKS_VARIABLE, "")) or 1)), 1)


def group_cores(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> float:
    """The time that control groups grant, in cores; without a limit, any number."""
    allowed = [float("inf")]
    for folder in binding_groups(root, own_groups, controller="", mount=""):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        allowed.append(_ratio(quota, period))
    for mount in ("cpu", "cpu,cpuacct"):
        for folder in binding_groups(root, own_groups, controller="cpu", mount=mount):
            quota, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            allowed.append(_ratio(quota, period))
    return min(allowed)


def _ratio(quota: str, period: str) -> float:
    granted, out_of = read_number(quota), read_number(period)
    return granted / out_of if granted and out_of else float("inf")


def available_host_bytes(cgroup_root: Path = ROOT, process_cgroups: Path = OWN_GROUPS) -> int:
    """The bytes this process can still take before the host, or its control group, runs out."""
    return MemoryMeter(cgroup_root, process_cgroups).available_bytes()


def group_limit_bytes(cgroup_root: Path = ROOT, process_cgroups: Path = OWN_GROUPS) -> int | None:
    """The least memory limit of the control groups that this process is in; None without one."""
    limits = (_limit(folder, layout) for folder, layout in _own_groups(cgroup_root, process_cgroups))
    return min((limit for limit in limits if limit is not None), default=None)


def free_shared_bytes() -> int | None:
    """What is free of the memory that processes share through files; None: this system sets no such bound."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def process_resident_bytes() -> int:
    """The host memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


class MemoryMeter:
    """As `available_host_bytes`, but for many readings: the groups that set a limit are found once."""

    def __init__(self, cgroup_root: Path = ROOT, process_cgroups: Path = OWN_GROUPS) -> None:
        groups = _own_groups(cgroup_root, process_cgroups)
        self._limited = [(folder, layout) for folder, layout in groups if _limit(folder, layout) is not None]

    def available_bytes(self) -> int:
        """The bytes this process can still take now."""
        available = int(psutil.virtual_memory().available)
        for folder, layout in self._limited:
            available = min(available, _left_in_group(folder, layout, enough_bytes=available))
        return available


class CpuMeter:
    """The busy share of all cores between one reading and the next.

    As `psutil.cpu_percent(interval=None)`, but each meter has a past of its own (psutil's is shared in the thread,
    in older versions in the process), and the first reading is None rather than a meaningless 0.
    """

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None  # busy and total seconds over all cores, since the host started

    def fraction(self) -> float | None:
        """From 0 to 1; None at first, and where the host's clock has not ticked since (it does every 10 ms)."""
        times = psutil.cpu_times()
        # Linux counts the time of guests in `user` and `nice` too.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        busy_before, total_before = self._before or (busy, total)
        self._before = (busy, total)
        if total <= total_before:
            return None
        return min(1.0, max(0.0, (busy - busy_before) / (total - total_before)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CgroupLayout:
    """Where one version of control groups keeps its figures of memory."""

    controller: str  # in /proc/self/cgroup; version 2 has one hierarchy and names none
    mount: str  # below the root
    limit: str
    usage: str
    reclaimable: str  # in memory.stat: file cache that the kernel drops before it kills anyone


_NO_LIMIT = 2**62

_LAYOUTS = (
    _CgroupLayout(controller="", mount="", limit="memory.max", usage="memory.current", reclaimable="inactive_file"),
    _CgroupLayout(
        controller="memory",
        mount="memory",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        reclaimable="total_inactive_file",
    ),
)


def _own_groups(root: Path, process_cgroups: Path) -> Iterator[tuple[Path, _CgroupLayout]]:
    for layout in _LAYOUTS:
        for folder in binding_groups(root, process_cgroups, controller=layout.controller, mount=layout.mount):
            yield folder, layout


def _limit(folder: Path, layout: _CgroupLayout) -> int | None:
    """None for no limit: the word "max", its number in version 1 (the top of 63 bits), or no such control group."""
    limit = read_number(read_text(folder / layout.limit))
    return limit if limit is not None and limit < _NO_LIMIT else None


def _left_in_group(folder: Path, layout: _CgroupLayout, *, enough_bytes: int) -> int:
    """The room left under a limit; where there is enough without the file cache, what it would give is not read."""
    limit, usage = _limit(folder, layout), read_number(read_text(folder / layout.usage))
    if limit is None or usage is None or limit - usage >= enough_bytes:
        return enough_bytes
    reclaimable = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == layout.reclaimable:
            reclaimable = read_number(value) or 0
    return max(0, limit - max(0, usage - reclaimable))
