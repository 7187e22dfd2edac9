"""What the NVIDIA driver says about a card: how much of its memory is in use, and by whom.

The only file that imports pynvml, and only inside a call: importing this starts nothing. It does not know torch,
so callers name a card by its uuid, which `CUDA_VISIBLE_DEVICES` does not renumber. A machine without a
card, a driver or the library is an ordinary answer here (None), never an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["DeviceMemory", "device_memory", "driver_version"]

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one card at one moment, over all processes."""

    total_bytes: int
    used_bytes: int  # by processes; the driver's own reserve is left out where the driver tells it apart
    used_by_this_process_bytes: int | None  # with its CUDA context; None: the driver does not say (containers)
    used_by_others_bytes: int


def device_memory(
    device_uuid: str | None = None, index: int = 0, *, own_bytes: int | None = None
) -> DeviceMemory | None:
    """The memory in use on a card, or None where it cannot be told.

    `device_uuid` is `str(torch.cuda.get_device_properties(i).uuid)`, with or without its "GPU-"; an unknown one
    gives None rather than another card. `index` counts the driver's cards and is used only without a uuid.
    Where the driver keeps per-process figures back, `own_bytes` (what this process has reserved) stands in for
    them: its CUDA context then counts among the others, and without it everything does.
    """
    return _ask(lambda nvml: _read_memory(nvml, _find_device(nvml, device_uuid, index), own_bytes))


def driver_version() -> str | None:
    """The version of the NVIDIA driver, such as "570.86.15", or None without one."""
    return _ask(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))


def _ask(question: Callable[[Any], _Answer]) -> _Answer | None:
    """Start NVML, ask, and shut it down again (NVML counts its users, so others in the process are not cut off)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _find_device(nvml: Any, device_uuid: str | None, index: int) -> Any:
    if device_uuid is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    bare = device_uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")  # torch gives a slice's uuid without saying that it is one


def _read_memory(nvml: Any, device: Any, own_bytes: int | None) -> DeviceMemory:
    figures = _memory_info(nvml, device)
    total, used = int(figures.total), int(figures.used)
    own = _own_process_bytes(nvml, device, total)
    known_own = own if own is not None else own_bytes or 0
    return DeviceMemory(
        total_bytes=total,
        used_bytes=used,
        used_by_this_process_bytes=own,
        used_by_others_bytes=max(0, used - known_own),  # the figures are not read at the same instant
    )


def _memory_info(nvml: Any, device: Any) -> Any:
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        # Drivers before 510 know only the first form, in which the driver's reserve counts as used.
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetMemoryInfo(device, version=version)
    return nvml.nvmlDeviceGetMemoryInfo(device)


def _own_process_bytes(nvml: Any, device: Any, total_bytes: int) -> int | None:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    except nvml.NVMLError:
        return None
    figures = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    # "Not available" is None, or all bits set where the binding does not translate it.
    usable = [int(figure) for figure in figures if figure is not None and 0 <= figure <= total_bytes]
    return sum(usable) if usable and len(usable) == len(figures) else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
