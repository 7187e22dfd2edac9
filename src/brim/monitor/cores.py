"""How many cores this process can count on: fewer than the machine has, in a container, beside other ranks, in a sweep.

A container with four cores' worth of time on a machine of 64 may run on all 64, and is stopped for most of every tenth
of a second when it does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from brim.monitor.control_groups import OWN_GROUPS, ROOT, binding_groups, read_number, read_text

__all__ = ["CORES_VARIABLE", "own_cores"]

CORES_VARIABLE = "BRIM_CORES"  # what a sweep tells the experiments that share a device; anybody may set it
RANKS_VARIABLE = "LOCAL_WORLD_SIZE"  # torchrun: processes on this machine


def own_cores(
    environment: Mapping[str, str] | None = None, cgroup_root: Path = ROOT, own_groups: Path = OWN_GROUPS
) -> int:
    """Cores for this process, one at least: those it may run on and has time on, shared with the other ranks here."""
    surroundings = os.environ if environment is None else environment
    told = read_number(surroundings.get(CORES_VARIABLE, ""))
    if told:
        return told
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    allowed = min(cores, _allowed_cores(cgroup_root, own_groups))
    return max(int(allowed / (read_number(surroundings.get(RANKS_VARIABLE, "")) or 1)), 1)


def _allowed_cores(root: Path, own_groups: Path) -> float:
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
