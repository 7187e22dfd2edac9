"""Marks on a device's own timeline, and the time between two of them."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Timeline"]


class Timeline:
    """On CUDA a mark is an event in the stream, so that nothing waits for it; elsewhere it is the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Here, behind everything that the device has been given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """From one mark to a later one; waits for the later."""
        if not self._cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000.0
