"""The windows of a training loop of one's own: the samples of an optimizer step, and where they come from.

A window is a batch that a `DataLoader` has collated, which is cut along its samples, or a list of samples, of which
every micro-batch is collated by itself. Knows nothing of losses or memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from brim.errors import RequestError
from brim.ranks.world import World
from brim.settings.setting_checks import is_whole
from brim.training.batch_parts import part_of, samples_in
from brim.training.loop import Window, epoch_order

__all__ = [
    "CollatedWindow",
    "DataSetWindows",
    "EpochRequest",
    "LoaderWindows",
    "LoopWindow",
    "WindowSource",
    "make_windows",
]


class LoopWindow(Sized):
    """The samples of one optimizer step on this rank."""

    def cost(self, item: int) -> int:
        """Of one of them."""
        raise NotImplementedError

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        """Some of them as a micro-batch."""
        raise NotImplementedError


class CollatedWindow(LoopWindow):
    """A batch as a `DataLoader` made it."""

    def __init__(self, batch: Any, cost: Callable[[Any], int] | None) -> None:
        self._batch = batch
        self._length = samples_in(batch)
        self._cost = 1 if cost is None else _checked_cost(cost(batch))

    def __len__(self) -> int:
        return self._length

    def cost(self, item: int) -> int:
        del item  # all are padded to the same length
        return self._cost

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        del collate
        return part_of(self._batch, items[0], items[-1] + 1)


class SampleWindow(LoopWindow):
    """Samples that are put together micro-batch by micro-batch."""

    def __init__(self, samples: Sequence[Any], cost: Callable[[Any], int] | None) -> None:
        self._samples = samples
        self._costs = [1 if cost is None else _checked_cost(cost(sample)) for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def cost(self, item: int) -> int:
        return self._costs[item]

    def part(self, items: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
        return collate([self._samples[item] for item in items])


def _checked_cost(cost: Any) -> int:
    if not is_whole(cost, least=0):
        raise RequestError(f"cost= returned {cost!r:.60}: it must be a whole number from 0")
    return max(int(cost), 1)


class WindowSource(Sized):
    """Where windows come from."""

    def windows(self) -> Iterator[LoopWindow]:
        """Those of one epoch."""
        raise NotImplementedError

    def advance(self) -> None:
        """The window that was given last is done."""

    def state(self) -> Any:
        """Where it stands, as JSON values."""
        return None

    def load(self, state: Any) -> None:
        """Continue there."""


class LoaderWindows(WindowSource):
    """Windows that the caller's own loader makes."""

    def __init__(self, batches: Iterable[Any], cost: Callable[[Any], int] | None) -> None:
        self._batches = batches
        self._cost = cost

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # an iterable without a length says so itself

    def windows(self) -> Iterator[LoopWindow]:
        for batch in self._batches:
            yield CollatedWindow(batch, self._cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRequest:
    """How a data set is divided into windows."""

    effective_batch: int
    shuffle: bool
    seed: int
    drop_last: bool
    num_workers: int


class DataSetWindows(WindowSource):
    """Windows of a data set: each rank has its share of every one."""

    def __init__(self, data: Any, asked: EpochRequest, cost: Callable[[Any], int] | None, world: World) -> None:
        self._data = data
        self._asked = asked
        self._cost = cost
        self._world = world
        self._epoch = 0
        self._done = 0  # windows of this epoch
        self._resumes = False  # in the middle of it, where a checkpoint was

    def __len__(self) -> int:
        count = len(self._data) / self._asked.effective_batch
        return math.floor(count) if self._asked.drop_last else math.ceil(count)

    def windows(self) -> Iterator[LoopWindow]:
        if self._done > 0 and not self._resumes:  # the last epoch was left before its end
            self._epoch, self._done = self._epoch + 1, 0
        self._resumes = False
        shares = self._shares()[self._done :]
        loader: Any = DataLoader(
            self._data,
            batch_sampler=shares,
            num_workers=self._asked.num_workers,
            collate_fn=list,  # samples as they are: micro-batches are put together later
            generator=torch.Generator().manual_seed(
                self._asked.seed + self._epoch
            ),  # a draw from the run's own moves it
        )
        for samples in loader:
            yield SampleWindow(samples, self._cost)
        self._epoch, self._done = self._epoch + 1, 0

    def advance(self) -> None:
        self._done += 1

    def state(self) -> Any:
        return {"epoch": self._epoch, "windows": self._done, **self._facts()}

    def load(self, state: Any) -> None:
        facts = self._facts()
        others = [
            f"{name} {state[name]}, now {facts[name]}" for name in facts if state.get(name, facts[name]) != facts[name]
        ]
        if others and state["windows"] > 0:
            raise RequestError(
                f"the state to load is from the midst of an epoch with other windows ({'; '.join(others)}): samples "
                "would be left out or count twice; continue with the same, or load a state from the end of an epoch"
            )
        self._epoch, self._done, self._resumes = int(state["epoch"]), int(state["windows"]), True

    def _facts(self) -> dict[str, Any]:
        """Which samples a window has."""
        asked = self._asked
        order = {"shuffle": asked.shuffle, "seed": asked.seed}
        return {"samples": len(self._data), "effective_batch_size": asked.effective_batch, **order}

    def _shares(self) -> list[list[int]]:
        count, asked = len(self._data), self._asked
        order = epoch_order(count, seed=asked.seed, epoch=self._epoch) if asked.shuffle else range(count)
        starts = range(0, len(self) * asked.effective_batch, asked.effective_batch)
        windows = [Window(start=start, stop=min(start + asked.effective_batch, count)) for start in starts]
        return [window.share(order, rank=self._world.rank, ranks=self._world.size) for window in windows]


def make_windows(
    samples: Any, epochs: EpochRequest | None, cost: Callable[[Any], int] | None, world: World
) -> WindowSource | None:
    """The windows of a data set, or those of a loader; None where there is no data. Raises a `RequestError`."""
    if epochs is None:
        if samples is None:
            return None
        if not isinstance(samples, Iterable) or isinstance(samples, torch.Tensor):
            raise RequestError(
                f"samples: a {type(samples).__name__} without effective_batch_size=; give both, or a DataLoader whose "
                "batches are the windows"
            )
        return LoaderWindows(samples, cost)
    count = epochs.effective_batch
    if not is_whole(count, least=1):
        raise RequestError(f"effective_batch_size={count!r}: give a whole number from 1")
    if isinstance(samples, DataLoader):
        raise RequestError(
            "samples is a DataLoader, whose batches are the effective batch already; leave effective_batch_size= out, "
            "or give its data set"
        )
    by_number = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not by_number or isinstance(samples, (IterableDataset, Mapping)):
        raise RequestError(
            f"samples: a {type(samples).__name__} has no length or no samples by number; give a data set, "
            "or a DataLoader without effective_batch_size="
        )
    return DataSetWindows(samples, dataclasses.replace(epochs, effective_batch=int(count)), cost, world)
