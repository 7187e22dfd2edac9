"""One loader for all remaining epochs of a training run and their validations: its processes prepare samples ahead.

Starting processes takes time and an epoch may be short, so processes stay from epoch to epoch. The first samples of a
validation are prepared while the epoch's last steps run, and those of the next epoch during the validation. The
loader's keys number every sample of every epoch and validation. Random numbers that preparing a sample draws (a user's
augmentations) depend on seed, epoch and sample alone, not on the processes or on a resumed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from brim.ranks.world import World
from brim.running.loader import Loader, LoaderSettings
from brim.training.data_sets import TrainingData
from brim.training.items import Items
from brim.training.loop import EpochRules, Window, epoch_order

__all__ = ["EpochLoader", "LoaderKeys", "ValidationLoader", "ValidationOrder", "start_loading", "validation_order"]


def validation_order(items: Items, *, rank: int, ranks: int) -> list[int]:
    """A rank's validation samples as they are taken: the costliest first."""
    return sorted(range(rank, len(items), ranks), key=lambda item: -items.cost(item))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationOrder:
    """The validation samples of a rank in the order in which they are taken, and after which epochs."""

    items: Items
    order: Sequence[int]
    follows: Callable[[int], bool]  # whether an epoch ends with a validation, as far as that is known beforehand

    def prepare(self, item: int) -> Any:
        """The sample, ready to be batched: the same whenever it is asked for."""
        return self.items.prepare_for_epoch(0, item, seed=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderKeys:
    """A key for every sample of a rank in every remaining epoch and validation, in the order of the run.

    Training samples have keys from 0, validation samples below 0.
    """

    items: Items
    seed: int
    rank: int
    ranks: int
    epochs: int  # of the whole run
    epoch: int = 0  # the first remaining one
    position: int = 0  # where it starts
    validation: ValidationOrder | None = None
    validates_first: bool = False  # the first remaining epoch ends with a validation, whatever `follows` says

    def __len__(self) -> int:
        per_epoch = len(range(self.rank, len(self.items), self.ranks))
        training = per_epoch * (self.epochs - self.epoch) - len(range(self.rank, self.position, self.ranks))
        return training + sum(len(self._validated_after(epoch)) for epoch in range(self.epoch, self.epochs))

    def __iter__(self) -> Iterator[int]:
        count = len(self.items)
        for epoch in range(self.epoch, self.epochs):
            order = epoch_order(count, seed=self.seed, epoch=epoch)
            window = Window(start=self.position if epoch == self.epoch else 0, stop=count)
            for item in window.share(order, rank=self.rank, ranks=self.ranks):
                yield self.key(epoch, item)
            for item in self._validated_after(epoch):
                yield self.validation_key(epoch, item)

    def _validated_after(self, epoch: int) -> Sequence[int]:
        if self.validation is None:
            return ()
        first = self.validates_first and epoch == self.epoch
        return self.validation.order if first or self.validation.follows(epoch) else ()

    def key(self, epoch: int, item: int) -> int:
        """The number of a sample in an epoch."""
        return epoch * len(self.items) + item

    def validation_key(self, epoch: int, item: int) -> int:
        """The number of a validation sample after an epoch."""
        assert self.validation is not None
        return -1 - (epoch * len(self.validation.items) + item)

    def prepare(self, key: int) -> Any:
        """The sample of that number, ready to be batched."""
        if key < 0:
            assert self.validation is not None
            return self.validation.prepare((-1 - key) % len(self.validation.items))
        epoch, item = divmod(key, len(self.items))
        return self.items.prepare_for_epoch(epoch, item, seed=self.seed)


class EpochLoader:
    """Prepared samples, epoch after epoch.

        loader.begin(epoch, position)
        prepared = loader.take([4, 9])
        loader.done([4, 9])
        loader.end()
        held_out = loader.begin_validation(epoch)    # has `take` and `done` as well
        loader.close()

    `wait_seconds` is how long `take` has waited, without validations; `workers` is the number of processes; `notes` are
    for the record, each once what it is about has ended.
    """

    def __init__(self, keys: LoaderKeys, settings: LoaderSettings, *, pin: bool, note: Callable[[str], None]) -> None:
        self.wait_seconds = 0.0
        self.workers = 0
        self.notes: list[str] = []
        self._keys, self._settings = keys, keys.items.loader_settings(settings)
        self._pin, self._note = pin, note
        self._loader: Loader | None = None
        self._stack = contextlib.ExitStack()
        self._epoch = 0

    def begin(self, epoch: int, position: int) -> None:
        """Start an epoch, or resume it at a position of its order; may be called early, for its processes to start."""
        self._epoch = epoch
        self.end()  # a process was lost in the validation before
        if self._loader is None:
            self._start(dataclasses.replace(self._keys, epoch=epoch, position=position, validates_first=False))

    def _start(self, keys: LoaderKeys) -> None:
        self._keys = keys
        loader = Loader(keys.prepare, keys, self._settings, pin=self._pin)
        self._loader = self._stack.enter_context(loader)
        self.workers = loader.workers or 0
        # The next loader need not measure again.
        self._settings = dataclasses.replace(self._settings, num_workers=self.workers, item_bytes=loader.item_bytes)

    def take(self, items: Sequence[int]) -> list[Any]:
        """The prepared samples of this epoch."""
        assert self._loader is not None
        before = self._loader.wait_seconds
        taken = self._loader.take([self._keys.key(self._epoch, item) for item in items])
        self.wait_seconds += self._loader.wait_seconds - before
        return taken

    def done(self, items: Sequence[int]) -> None:
        """These samples will not be taken again in this epoch."""
        assert self._loader is not None
        self._loader.done([self._keys.key(self._epoch, item) for item in items])

    def end(self) -> None:
        """End an epoch; running processes stay, lost ones are replaced when the next samples are asked for."""
        if self._loader is not None and not self._loader.running:
            self.close()

    @property
    def validates(self) -> bool:
        """Whether validation samples come from here too."""
        return self._keys.validation is not None

    def begin_validation(self, epoch: int, *, expected: bool = True) -> ValidationLoader:
        """The validation samples after an epoch.

        One that is not `expected`, because the run ends in the midst of an epoch, begins with new processes: the old
        ones prepare what is not needed any more.
        """
        if not expected:
            self.close()
        if self._loader is None:
            end = len(self._keys.items)
            self._start(dataclasses.replace(self._keys, epoch=epoch, position=end, validates_first=True))
        assert self._loader is not None
        return ValidationLoader(self._loader, self._keys, epoch)

    def close(self) -> None:
        """End the processes; `begin` starts new ones."""
        loader, self._loader = self._loader, None
        self._stack.close()
        if loader is not None:
            self.notes += loader.notes
            for line in loader.notes:
                self._note(line)


def start_loading(
    data: TrainingData,
    rules: EpochRules,
    settings: LoaderSettings,
    *,
    seed: int,
    place: tuple[int, int],
    world: World,
    validates: bool,
    device: torch.device,
    note: Callable[[str], None],
) -> EpochLoader | None:
    """Start the processes of a run that begins at `place` (epoch, position); None where samples need no processes.

    Without `validates`, validation prepares its samples itself.
    """
    if not data.train.uses_loader:
        return None
    held_out, order = data.validation if validates else None, None
    if held_out is not None and held_out.uses_loader:
        share = validation_order(held_out, rank=world.rank, ranks=world.size)
        order = ValidationOrder(items=held_out, order=share, follows=rules.validates_after)
    keys = LoaderKeys(
        items=data.train, seed=seed, rank=world.rank, ranks=world.size, epochs=rules.epochs, validation=order
    )
    loader = EpochLoader(keys, settings, pin=device.type == "cuda", note=note)
    epoch, position = place
    if epoch < rules.epochs:
        loader.begin(epoch, position)
    return loader


class ValidationLoader:
    """The prepared validation samples after one epoch."""

    def __init__(self, loader: Loader, keys: LoaderKeys, epoch: int) -> None:
        self._loader, self._keys, self._epoch = loader, keys, epoch

    def take(self, items: Sequence[int]) -> list[Any]:
        """The prepared samples."""
        return self._loader.take(self._numbered(items))

    def done(self, items: Sequence[int]) -> None:
        """These samples will not be taken again."""
        self._loader.done(self._numbered(items))

    def set_aside(self, items: Sequence[int]) -> None:
        """These samples will be taken again when all others are done."""
        self._loader.set_aside(self._numbered(items))

    def _numbered(self, items: Sequence[int]) -> list[int]:
        return [self._keys.validation_key(self._epoch, item) for item in items]
