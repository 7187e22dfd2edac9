"""Linux control groups, both versions: which of them bind this process, and the figures in their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["OWN_GROUPS", "ROOT", "binding_groups", "read_number", "read_text"]

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
    """What a file says; nothing where there is none."""
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
