"""What changes a workload's memory or speed without being asked for: versions and switches of the process."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from brim.monitor.nvml import driver_version

__all__ = ["environment_facts"]

_PACKAGES = ("brim", "torch", "torchvision", "timm", "transformers")
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_V8_API_DISABLED")


def environment_facts(device: torch.device) -> dict[str, Any]:
    """Library versions, allocator settings, TF32, cudnn.benchmark, attention back ends, compile state."""
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": _versions()}
    facts["variables"] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    facts["deterministic"] = torch.are_deterministic_algorithms_enabled()
    facts["matmul_precision"] = torch.get_float32_matmul_precision()
    facts["compile_disabled"] = os.environ.get("TORCHDYNAMO_DISABLE", "")
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        facts["driver"] = driver_version()
        facts["cudnn"] = _cudnn_facts()
        facts["attention"] = {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        }
    return facts


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cudnn_facts() -> dict[str, Any]:
    return {
        "version": torch.backends.cudnn.version(),
        "enabled": torch.backends.cudnn.enabled,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "tf32": torch.backends.cudnn.conv.fp32_precision
        if hasattr(torch.backends.cudnn, "conv")
        else torch.backends.cudnn.allow_tf32,
    }
