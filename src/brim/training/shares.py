"""One rank's share of a window as work: the dearest samples first, fetched part by part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brim.errors import RequestError
from brim.running.loader import NotPrepared
from brim.training.epoch_loader import EpochLoader
from brim.training.items import Items
from brim.training.micro_batches import WindowWork
from brim.training.objective import Batch

__all__ = ["Shares"]


class Shares:
    """Makes work of item numbers; batches are put together on the device, if one is given and that spares a copy."""

    def __init__(self, items: Items, device: torch.device | None = None) -> None:
        self._items = items
        self._device = device
        self._costs = None if items.uniform else [items.cost(item) for item in range(len(items))]

    def work(
        self, share: Sequence[int], samples: int, loader: EpochLoader | None, *, measure_noise: bool = False
    ) -> WindowWork:
        """The work of a share of a window; without a loader items are prepared as they are fetched."""
        items = list(share)
        costs = [1] * len(items)
        if self._costs is not None:
            known = self._costs
            items.sort(key=lambda item: -known[item])  # the order within a window changes nothing, and padding less
            costs = [known[item] for item in items]

        def fetch(part: Sequence[int]) -> Batch:
            prepared = None if loader is None else loader.take(part)
            for item, one in zip(part, prepared or (), strict=False):
                if isinstance(one, NotPrepared):
                    raise RequestError(f"training sample {self._items.ids[item]} cannot be used: {one.message}")
            return self._items.batch(part, prepared, device=self._device)

        return WindowWork(items=items, costs=costs, samples=samples, fetch=fetch, measure_noise=measure_noise)
