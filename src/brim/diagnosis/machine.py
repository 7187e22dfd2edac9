"""Facts of this machine and process as plain values: cards by NVML, devices by torch, host, folders, variables.

What cannot be read says why and is never an error. What the facts mean is `problems.py`'s.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from brim.diagnosis.installed import torch_build
from brim.errors import first_line
from brim.monitor.host import available_host_bytes, free_shared_bytes, group_cores, group_limit_bytes, own_cores
from brim.monitor.live import registered_runs_folder
from brim.monitor.nvml import CardRow, OpenCards
from brim.storage.files import cache_folder

__all__ = ["read_driver", "read_folders", "read_host", "read_torch", "read_variables"]

# What changes what brim or torch does here. None of them holds a password or a key.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "TORCHDYNAMO_DISABLE", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "BRIM_CORES",
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_MODE",
    "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR", "PYTHONPATH", "NO_COLOR",
)  # fmt: skip


def read_driver() -> dict[str, Any]:
    """The driver, the newest CUDA that it runs, and its cards; `problem` says why there are none."""
    cards = OpenCards()
    try:
        rows = cards.read()
    finally:
        cards.close()
    return {
        "version": cards.driver,
        "cuda": cards.cuda_version,
        "problem": cards.problem,
        "cards": [_card(row) for row in rows],
    }


def _card(row: CardRow) -> dict[str, Any]:
    figures = row.figures
    return {
        "index": row.index,
        "uuid": row.uuid,
        "name": row.name,
        "slice_of": row.slice_of,
        "memory_total_bytes": row.memory_total_bytes,
        "memory_used_bytes": figures.memory_used_bytes,
        "utilisation": figures.utilisation,
        "temperature_c": figures.temperature_c,
        "power_watts": figures.power_watts,
        "power_limit_watts": row.power_limit_watts,
        "throttle_reasons": None if figures.throttle_reasons is None else list(figures.throttle_reasons),
        "problem": row.problem,
    }


def read_torch() -> dict[str, Any]:
    """Torch's build, and the devices that it lists, each of which is tried with one small addition.

    `problem` is what importing torch, or looking for devices, had to say against it.
    """
    build = torch_build()
    found: dict[str, Any] = {**(build or {"version": None, "cuda": None, "hip": None}), "problem": None, "devices": []}
    if build is None:
        return {**found, "problem": "torch is not installed"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch

            found["devices"] = [_device(torch, index) for index in range(torch.cuda.device_count())]
            torch.cuda.is_available()  # which warns of a driver that is too old
            mps = getattr(torch.backends, "mps", None)
            if mps is not None and mps.is_available():
                found["devices"].append({**_EMPTY, "name": "mps", "problem": _trial(torch, "mps")})
        except Exception as error:  # a library of torch that cannot be loaded, a driver that breaks
            return {**found, "problem": f"{type(error).__name__}: {first_line(error)}"}
    about_cuda = [str(warning.message) for warning in caught if "CUDA" in str(warning.message)]
    return {**found, "problem": first_line(about_cuda[0]) if about_cuda and not found["devices"] else None}


_EMPTY: dict[str, Any] = dict.fromkeys(("name", "model", "uuid", "capability", "memory_total_bytes", "problem"))


def _device(torch: Any, index: int) -> dict[str, Any]:
    name = f"cuda:{index}"
    try:
        figures = torch.cuda.get_device_properties(index)
    except Exception as error:
        return {**_EMPTY, "name": name, "problem": first_line(error)}
    return {
        "name": name,
        "model": figures.name,
        "uuid": str(uuid) if (uuid := getattr(figures, "uuid", None)) is not None else None,
        "capability": f"{figures.major}.{figures.minor}",
        "memory_total_bytes": int(figures.total_memory),
        "problem": _trial(torch, name),
    }


def _trial(torch: Any, device: str) -> str | None:
    """Why one small addition fails on a device; None: it runs."""
    try:
        answer = float((torch.ones(1, device=device) + 1).item())
    except Exception as error:
        return first_line(error)
    return None if answer == 2 else f"1 + 1 is {answer} there"


def read_host() -> dict[str, Any]:
    """Cores and memory, with what control groups allow (None: no limit)."""
    allowed = group_cores()
    return {
        "cores": os.cpu_count(),
        "cores_of_group": None if allowed == float("inf") else allowed,
        "cores_for_brim": own_cores(),
        "memory_total_bytes": int(psutil.virtual_memory().total),
        "memory_of_group_bytes": group_limit_bytes(),
        "memory_available_bytes": available_host_bytes(),
        "shared_free_bytes": free_shared_bytes(),
    }


def read_folders() -> dict[str, Any]:
    """Where brim writes beside run folders: whether it can, and what is free there."""
    return {
        "cache": _folder(cache_folder),
        "state": _folder(registered_runs_folder),
        "temporary": _folder(lambda: Path(tempfile.gettempdir())),
    }


def _folder(place: Callable[[], Path]) -> dict[str, Any]:
    """A file without a name is written at the place, or where it would be made; nothing stays behind."""
    found: dict[str, Any] = {"path": None, "writable": False, "free_bytes": None, "problem": None}
    try:
        path = place()
        found["path"] = str(path)
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        found["free_bytes"] = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"brim")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return {**found, "problem": getattr(error, "strerror", None) or first_line(error)}
    return {**found, "writable": True}


def read_variables() -> dict[str, str]:
    """Those of `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
