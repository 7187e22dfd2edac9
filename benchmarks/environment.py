"""What a measurement was made on: the card, and the versions that matter."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["environment", "machine"]

_PACKAGES = ("torch", "torchvision", "transformers", "accelerate", "pytorch-lightning", "peft", "trl")


def environment() -> dict[str, Any]:
    """The card, Python, CUDA and the packages that are installed."""
    import torch

    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "python": platform.python_version(), "packages": found, "cuda": torch.version.cuda}


def machine() -> dict[str, Any]:
    """`environment()`, and what identifies the machine: its processor, cores and memory, the driver, brim's version."""
    import os

    import psutil
    import torch

    import brim
    from brim.monitor.nvml import driver_version

    found = environment()
    return {
        **found,
        "driver": driver_version() if found["gpu"] else None,
        "gpus": torch.cuda.device_count(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "brim": brim.__version__,
    }


def _processor() -> str:
    """The processor's name: Linux has it in a file, others where Python finds it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
