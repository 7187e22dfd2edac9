"""One loader for all remaining epochs of a training run: its processes prepare samples ahead.

Starting processes takes time and an epoch may be short, so processes stay from epoch to epoch, and the first samples of
an epoch are ready when it begins. The loader's keys number every sample of every epoch. Random numbers that preparing a
sample draws (a user's augmentations) depend on seed, epoch and sample alone, not on the processes or on a resumed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from brim.running.loader import Loader, LoaderSettings
from brim.training.items import Items
from brim.training.loop import Window, epoch_order

__all__ = ["EpochLoader", "LoaderKeys"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderKeys:
    """A key for every sample of a rank in every remaining epoch, in the order of the run."""

    items: Items
    seed: int
    rank: int
    ranks: int
    epochs: int  # of the whole run
    epoch: int = 0  # the first remaining one
    position: int = 0  # where it starts

    def __len__(self) -> int:
        per_epoch = len(range(self.rank, len(self.items), self.ranks))
        return per_epoch * (self.epochs - self.epoch) - len(range(self.rank, self.position, self.ranks))

    def __iter__(self) -> Iterator[int]:
        count = len(self.items)
        for epoch in range(self.epoch, self.epochs):
            order = epoch_order(count, seed=self.seed, epoch=epoch)
            window = Window(start=self.position if epoch == self.epoch else 0, stop=count)
            for item in window.share(order, rank=self.rank, ranks=self.ranks):
                yield self.key(epoch, item)

    def key(self, epoch: int, item: int) -> int:
        """The number of a sample in an epoch."""
        return epoch * len(self.items) + item

    def prepare(self, key: int) -> Any:
        """The sample of that number, ready to be batched."""
        epoch, item = divmod(key, len(self.items))
        return self.items.prepare_for_epoch(epoch, item, seed=self.seed)


class EpochLoader:
    """Prepared samples, epoch after epoch.

        loader.begin(epoch, position)
        prepared = loader.take([4, 9])
        loader.done([4, 9])
        loader.end(another=True)         # another loader will run before the next epoch: that of validation
        loader.close()

    `wait_seconds` is how long `take` has waited, `workers` the number of processes.
    """

    def __init__(self, keys: LoaderKeys, settings: LoaderSettings, *, pin: bool, note: Callable[[str], None]) -> None:
        self.wait_seconds = 0.0
        self.workers = 0
        self._keys, self._settings = keys, keys.items.loader_settings(settings)
        self._pin, self._note = pin, note
        self._loader: Loader | None = None
        self._stack = contextlib.ExitStack()
        self._epoch = 0

    @property
    def waited_seconds(self) -> float:
        """As `wait_seconds`, with the loader that runs now."""
        return self.wait_seconds + (0.0 if self._loader is None else self._loader.wait_seconds)

    def begin(self, epoch: int, position: int) -> None:
        """Start an epoch, or resume it at a position of its order."""
        self._epoch = epoch
        if self._loader is None:
            self._keys = dataclasses.replace(self._keys, epoch=epoch, position=position)
            loader = Loader(self._keys.prepare, self._keys, self._settings, pin=self._pin)
            self._loader = self._stack.enter_context(loader)
            self.workers = loader.workers or 0
            # The next loader need not measure again.
            self._settings = dataclasses.replace(self._settings, num_workers=self.workers, item_bytes=loader.item_bytes)

    def take(self, items: Sequence[int]) -> list[Any]:
        """The prepared samples of this epoch."""
        assert self._loader is not None
        return self._loader.take([self._keys.key(self._epoch, item) for item in items])

    def done(self, items: Sequence[int]) -> None:
        """These samples will not be taken again in this epoch."""
        assert self._loader is not None
        self._loader.done([self._keys.key(self._epoch, item) for item in items])

    def end(self, *, another: bool) -> None:
        """End an epoch.

        Running processes stay, unless another loader will need the pinned memory that they hold.
        """
        loader = self._loader
        if loader is not None and (not loader.running or (another and loader.holds_pinned_pool)):
            self.close()

    def close(self) -> None:
        """End the processes; `begin` starts new ones."""
        loader, self._loader = self._loader, None
        self._stack.close()
        if loader is not None:
            self.wait_seconds += loader.wait_seconds
            for line in loader.notes:
                self._note(line)
