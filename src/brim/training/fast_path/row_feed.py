"""Rows on the device: those of each step, and functions over many rows in passes that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from brim.memory.devices import DeviceMemory
from brim.memory.failures import FailureKind, classify
from brim.training.fast_path.task import Batch, Counts, EpochPlan, Orders, RowData, RunSpec, epoch_orders

__all__ = ["InPasses", "RowFeed"]


class RowFeed:
    """The rows of an epoch, step by step, for all runs of a stack.

    Orders and the counter of steps live where the rows do, in memory that stays: a CUDA graph that holds one step
    serves every step of the same size.
    """

    def __init__(
        self,
        data: RowData,
        plan: EpochPlan,
        specs: Sequence[RunSpec],
        *,
        stacked: bool,
        device: torch.device,
        resident: bool,
        order_of: Orders | None = None,
    ) -> None:
        self.resident = resident
        self._order_of = order_of or (lambda seed, epoch: epoch_orders(plan, seed=seed, epoch=epoch))
        self._pinned = device.type == "cuda" and not resident
        self._data = data.on(device if resident else torch.device("cpu"))
        self._plan = plan
        self._specs = specs
        self._stacked = stacked
        self._device = device
        home = device if resident else torch.device("cpu")
        self._orders = [torch.zeros(len(specs), span, dtype=torch.int64, device=home) for span in plan.spans]
        self.counter = torch.zeros(1, dtype=torch.int64, device=home)
        self._places = {
            count: torch.arange(count, device=home) for counts in (plan.full, plan.last) for count in counts
        }

    def orders(self, epoch: int) -> list[torch.Tensor]:
        """Every run's order of an epoch, on the host, `[runs, span]` for each stream."""
        found = [self._order_of(spec.seed, epoch) for spec in self._specs]
        orders = [torch.stack(streams) for streams in zip(*found, strict=True)]
        to_card = self.resident and self._device.type == "cuda"
        return [order.pin_memory() for order in orders] if to_card else orders

    def begin(self, orders: Sequence[torch.Tensor]) -> None:
        """Start an epoch that takes its rows in these orders."""
        for held, order in zip(self._orders, orders, strict=True):
            held.copy_(order, non_blocking=True)
        self.counter.zero_()

    def rows(self, counts: Counts) -> torch.Tensor:
        """The numbers of the rows of the step that the counter stands at, `[runs, rows]`."""
        chosen = [
            order.index_select(1, self.counter * full + self._places[count])
            for order, full, count in zip(self._orders, self._plan.full, counts, strict=True)
        ]
        return torch.cat(chosen, dim=1) if len(chosen) > 1 else chosen[0]

    def batch(self, counts: Counts) -> Batch:
        """The rows of the step that the counter stands at, on the device."""
        rows = self.rows(counts)
        flat = rows.flatten()
        gathered = {
            name: tensor.index_select(0, flat).unflatten(0, rows.shape) for name, tensor in self._data.tensors.items()
        }
        gathered |= {name: tensor.gather(1, rows) for name, tensor in self._data.per_run.items()}
        if not self._stacked:
            gathered = {name: tensor[0] for name, tensor in gathered.items()}
        return gathered if self.resident else {name: self._over(tensor) for name, tensor in gathered.items()}

    def names(self, orders: Sequence[torch.Tensor], run: int, step: int) -> list[list[str]]:
        """The names of one run's rows in one step, stream by stream."""
        counts = self._plan.counts(step)
        return [
            [self._data.name_of(int(row)) for row in order[run, step * full : step * full + count]]
            for order, full, count in zip(orders, self._plan.full, counts, strict=True)
        ]

    def _over(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.pin_memory() if self._pinned else tensor
        return tensor.to(self._device, non_blocking=self._pinned)


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
