"""What the host still has to give: memory that a process can take, and what this one holds.

Unlike `psutil.virtual_memory().available`, the figure also respects the limit of the container or batch job the
process runs in (Linux control groups, both versions). It knows nothing of devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["available_host_bytes", "process_resident_bytes"]


def available_host_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), process_cgroups: Path = Path("/proc/self/cgroup")
) -> int:
    """The bytes this process can still take before the host, or its control group, runs out."""
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(cgroup_root, process_cgroups)])


def process_resident_bytes() -> int:
    """The host memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where one version of control groups keeps its figures."""

    controller: str  # in /proc/self/cgroup; version 2 has one hierarchy and names none
    mount: str  # below the root
    limit: str
    usage: str
    reclaimable: str  # in memory.stat: file cache that the kernel drops before it kills anyone


_LAYOUTS = (
    _Layout(controller="", mount="", limit="memory.max", usage="memory.current", reclaimable="inactive_file"),
    _Layout(
        controller="memory",
        mount="memory",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        reclaimable="total_inactive_file",
    ),
)


def _cgroup_rooms(root: Path, process_cgroups: Path) -> Iterator[int]:
    """The room left under every limit that applies: a group is bound by its own and by those of all above it."""
    for layout in _LAYOUTS:
        mount = root / layout.mount
        group = _own_group(process_cgroups, layout.controller)
        # Inside a container the path may be the host's and not exist here; its own group is then the mount itself.
        for folder in (mount / group, *(mount / parent for parent in group.parents)):
            room = _room(folder, layout)
            if room is not None:
                yield room


def _own_group(process_cgroups: Path, controller: str) -> PurePosixPath:
    """This process's group relative to the mount, from lines such as `4:cpu,memory:/jobs/12` or `0::/jobs/12`."""
    for line in _read(process_cgroups).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(","):
            group = PurePosixPath(fields[2].lstrip("/"))
            return PurePosixPath() if ".." in group.parts else group  # outside this namespace: not to be seen here
    return PurePosixPath()


def _room(folder: Path, layout: _Layout) -> int | None:
    limit, usage = _number(_read(folder / layout.limit)), _number(_read(folder / layout.usage))
    if limit is None or usage is None:  # the word "max", or no such control group
        return None
    reclaimable = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == layout.reclaimable:
            reclaimable = _number(value) or 0
    return max(0, limit - max(0, usage - reclaimable))


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
