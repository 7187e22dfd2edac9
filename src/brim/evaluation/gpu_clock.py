"""How long the device stood idle between batches because the host was not ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim.evaluation.timeline import Timeline

__all__ = ["GpuClock"]


class GpuClock:
    """Marks where batches begin and end on the device's own timeline.

    On CUDA a gap between the end of one batch and the begin of the next is time in which the device had nothing to do.
    Elsewhere work is done when it is called, and the gaps are the host's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self._marks: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """A batch starts here."""
        self._begun = self._timeline.mark()

    def end(self) -> Callable[[], float]:
        """Everything of the batch has been handed to the device; gives what waits for it and says how long it took."""
        begun, ended = self._begun, self._timeline.mark()
        self._marks.append((begun, ended))
        return lambda: self._timeline.seconds(begun, ended)

    def wait_fraction(self) -> float | None:
        """Idle time between batches over the whole time from the first to the last; None before two batches."""
        if len(self._marks) < 2:
            return None
        idle = sum(
            max(self._timeline.seconds(self._marks[place][1], self._marks[place + 1][0]), 0.0)
            for place in range(len(self._marks) - 1)
        )
        whole = self._timeline.seconds(self._marks[0][0], self._marks[-1][1])
        return min(idle / whole, 1.0) if whole > 0 else None
