"""What a measurement was made on: the card, and the versions that matter."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

__all__ = ["environment"]

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
