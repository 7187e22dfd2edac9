"""How long the device stood idle between batches because the host was not ready."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["GpuClock"]


class GpuClock:
    """Marks where batches begin and end on the device's own timeline.

    On CUDA the marks are events in the stream: a gap between the end of one batch and the begin of the next is time
    in which the device had nothing to do. Elsewhere work is done when it is called, and the gaps are the host's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """A batch starts here."""
        self._begun = self._mark()

    def end(self) -> None:
        """Everything of the batch has been handed to the device."""
        self._marks.append((self._begun, self._mark()))

    def wait_fraction(self) -> float | None:
        """Idle time between batches over the whole time from the first to the last; None before two batches."""
        if len(self._marks) < 2:
            return None
        idle = sum(
            max(self._between(self._marks[place][1], self._marks[place + 1][0]), 0.0)
            for place in range(len(self._marks) - 1)
        )
        whole = self._between(self._marks[0][0], self._marks[-1][1])
        return min(idle / whole, 1.0) if whole > 0 else None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        if not self._cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000.0
