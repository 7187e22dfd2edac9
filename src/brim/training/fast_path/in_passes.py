"""A function over many rows that are on the device already, in passes of a size that fits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from brim.memory.devices import DeviceMemory
from brim.memory.failures import FailureKind, classify

__all__ = ["InPasses"]

FIRST_ROWS = 65_536


class InPasses:
    """Calls a function on rows in passes of a size that fits; halved when one does not, and kept for the next call.

    As `brim.map`, but on tensors that are on the device already, where batches need no order and no journal.
    """

    def __init__(self, memory: DeviceMemory, *, batch_size: int | None = None, dim: int = 0) -> None:
        self.batch_size = batch_size or FIRST_ROWS
        self.largest = 0  # rows in one pass, so far
        self.oom_events = 0
        self._memory = memory
        self._dim = dim

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """The function's results on all rows, joined along `dim`."""
        found: list[torch.Tensor] = []
        start = 0
        while start < len(rows):
            part = rows[start : start + self.batch_size]
            result = self._attempt(function, part)
            if result is None:
                continue
            found.append(result)
            self.largest = max(self.largest, len(part))
            start += len(part)
        return torch.cat(found, dim=self._dim)

    def _attempt(self, function: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor) -> torch.Tensor | None:
        """None after an out-of-memory error, with the size halved."""
        try:
            return function(part)
        except Exception as error:
            kind = classify(error).kind
            if len(part) == 1 or kind not in (FailureKind.OUT_OF_MEMORY, FailureKind.SIZE_LIMIT):
                raise
        self.oom_events += 1
        self.batch_size = len(part) // 2
        self._memory.release()
        return None
