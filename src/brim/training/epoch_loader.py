"""The samples of a training run, prepared ahead: one loader for all epochs that are left.

Starting processes takes a while and an epoch may be short, so they go on from one epoch to the next, and the first
samples of an epoch are there when it begins. A number stands for a sample in an epoch: what preparing it draws (a
function of the user's may augment it) follows from seed, epoch and sample alone, not from how many processes there are
or where a run was resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from brim.running.loader import Loader, LoaderSettings
from brim.training.items import Items
from brim.training.loop import Window, epoch_order

__all__ = ["EpochLoader"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AllEpochs:
    """One number for every sample of a rank in every epoch that is left, in the order of the run."""

    items: Items
    seed: int
    rank: int
    ranks: int
    epoch: int  # the first
    position: int  # in it
    epochs: int  # where they end

    def __len__(self) -> int:
        an_epoch = len(range(self.rank, len(self.items), self.ranks))
        return an_epoch * (self.epochs - self.epoch) - len(range(self.rank, self.position, self.ranks))

    def __iter__(self) -> Iterator[int]:
        count = len(self.items)
        for epoch in range(self.epoch, self.epochs):
            order = epoch_order(count, seed=self.seed, epoch=epoch)
            window = Window(start=self.position if epoch == self.epoch else 0, stop=count)
            for item in window.share(order, rank=self.rank, ranks=self.ranks):
                yield self.of(epoch, item)

    def of(self, epoch: int, item: int) -> int:
        return epoch * len(self.items) + item

    def prepare(self, number: int) -> Any:
        epoch, item = divmod(number, len(self.items))
        return self.items.prepare_in(epoch, item, seed=self.seed)


class EpochLoader:
    """Prepared samples, epoch after epoch.

        loader.begin(epoch, position)
        ready = loader.take([4, 9])
        loader.done([4, 9])
        loader.end(another=True)         # a loader of its own will run before the next epoch: that of validation
        loader.close()

    `wait_seconds` is how long `take` had to wait, `workers` how many processes there are.
    """

    def __init__(
        self,
        items: Items,
        settings: LoaderSettings,
        *,
        seed: int,
        epochs: int,
        rank: int,
        ranks: int,
        pin: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.wait_seconds = 0.0
        self.workers = 0
        self._settings = items.loading(settings)
        self._pin = pin
        self._tell = tell
        self._numbers = _AllEpochs(items=items, seed=seed, rank=rank, ranks=ranks, epoch=0, position=0, epochs=epochs)
        self._loader: Loader | None = None
        self._stack = contextlib.ExitStack()
        self._epoch = 0

    def begin(self, epoch: int, position: int) -> None:
        """An epoch begins, or goes on, at a place of its order."""
        self._epoch = epoch
        if self._loader is None:
            self._numbers = dataclasses.replace(self._numbers, epoch=epoch, position=position)
            loader = Loader(self._numbers.prepare, self._numbers, self._settings, pin=self._pin)
            self._loader = self._stack.enter_context(loader)
            self.workers = loader.workers or 0
            # Measured once.
            self._settings = dataclasses.replace(self._settings, num_workers=self.workers, item_bytes=loader.item_bytes)

    def take(self, items: Sequence[int]) -> list[Any]:
        """The samples, prepared for this epoch."""
        assert self._loader is not None
        return self._loader.take([self._numbers.of(self._epoch, item) for item in items])

    def done(self, items: Sequence[int]) -> None:
        """They will not be asked for again in this epoch."""
        assert self._loader is not None
        self._loader.done([self._numbers.of(self._epoch, item) for item in items])

    def end(self, *, another: bool) -> None:
        """The epoch is over.

        Processes that are well stay, unless another loader will want the locked room that they hold.
        """
        loader = self._loader
        if loader is not None and (not loader.running or (another and loader.holds_room)):
            self.close()

    def close(self) -> None:
        """End the processes; the next epoch starts new ones."""
        loader, self._loader = self._loader, None
        self._stack.close()
        if loader is not None:
            self.wait_seconds += loader.wait_seconds
            for note in loader.notes:
                self._tell(note)
