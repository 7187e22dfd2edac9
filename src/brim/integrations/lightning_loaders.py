"""The loaders of a Lightning stage: worst-case batches of any size out of them, and the same loaders at another size.

A worst-case batch repeats the costliest sample that was looked at, and the loader's own `collate_fn` puts it together.
Where a loader does not show its samples (it batches in its data set, has a batch sampler of its own, or is no
`DataLoader`), the size is set and the loader asked for a batch. Imports no Lightning.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from brim.errors import RequestError, plural
from brim.workloads.base import leading_length

__all__ = ["MadeBatch", "StageLoaders", "loaders_in", "rebuilt"]

MOST_SAMPLES = 256  # looked at in a data set, spread over it evenly
MOST_STREAMED_SAMPLES = 64  # looked at in an iterable data set, from its beginning
LOOKING_SECONDS = 5.0
# What a DataLoader that is made again keeps; `in_order` is of later releases of torch.
_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MadeBatch:
    """A batch as the loaders would give it, and how many samples of each loader it holds."""

    batch: Any
    length: int
    loader: int = 0  # which of several loaders that are run one after the other


class StageLoaders:
    """What the loaders of one stage give, at any size.

    Args:
        request: Makes the stage's loaders anew, or gives those that were passed in.
        set_size: Sets the batch size that `request` reads; None where loaders were passed in.
        make_batch: The user's own function for worst-case batches, in place of the loaders.
    """

    def __init__(
        self,
        request: Callable[[], Any],
        set_size: Callable[[int], None] | None,
        make_batch: Callable[[int], Any] | None = None,
    ) -> None:
        self._request = request
        self._set_size = set_size
        self._make_batch = make_batch
        self.structure = request()
        self.each = loaders_in(self.structure)
        self.in_turn = False  # whether a step takes a batch of one loader, and not of all at once
        if not self.each:
            raise RequestError("the stage has no loader to find a batch size for; return one from its *_dataloader()")
        self._samples: dict[int, Any] = {}  # the costliest, by loader
        self.notes: list[str] = []

    @property
    def smallest_length(self) -> int | None:
        """Samples that the loader with the fewest draws in an epoch; None if none of them has a length."""
        lengths = [_epoch_length(loader) for loader in self.each]
        return min((length for length in lengths if length is not None), default=None)

    def batches(self, size: int) -> list[MadeBatch]:
        """A batch of each loader in turn, or one of all of them at once in the structure that they have."""
        if self._make_batch is not None:
            return [MadeBatch(self._make_batch(size), size)]
        made = [self._of_loader(place, size) for place in range(len(self.each))]
        if self.in_turn:
            return made
        parts = iter(made)
        return [MadeBatch(_mapped(self.structure, lambda _: next(parts).batch), min(one.length for one in made))]

    def look(self) -> None:
        """Choose the costliest samples now, and not within the first probe."""
        for place, loader in enumerate(self.each):
            if self._make_batch is None and _shows_samples(loader):
                self._sample(place)

    def _of_loader(self, place: int, size: int) -> MadeBatch:
        if _shows_samples(self.each[place]):
            samples = [self._sample(place)] * size
            return MadeBatch(self.each[place].collate_fn(samples), size, place)
        if self._set_size is None:
            raise _not_rebuilt(self.each[place])
        self._set_size(size)
        batch = next(iter(loaders_in(self._request())[place]), None)
        if batch is None:
            raise RequestError("a loader gave no batch at all; give one that has samples, or make_batch=")
        return MadeBatch(batch, leading_length(batch), place)

    def _sample(self, place: int) -> Any:
        if place not in self._samples:
            looked, costliest = 0, None
            for sample in _spread_samples(_data_of(self.each[place])):
                looked += 1
                if costliest is None or _cost(sample) > _cost(costliest[0]):
                    costliest = (sample,)
            if costliest is None:
                raise RequestError("a loader's data set is empty; give one that has samples, or make_batch=")
            self._samples[place] = _copied(costliest[0])
            self.notes.append(f"batches repeat the costliest of {plural(looked, 'sample')} that were looked at")
        return self._samples[place]


def _not_rebuilt(loader: Any) -> RequestError:
    return RequestError(
        f"a {type(loader).__name__} was passed to the trainer, and brim cannot make one of another batch size; pass a "
        "plain DataLoader with batch_size=, or return it from train_dataloader() of a module or data module that reads "
        "self.batch_size"
    )


def loaders_in(structure: Any) -> list[Any]:
    """The loaders in a structure of them: one alone, a dict, a list, or Lightning's combination of those."""
    structure = getattr(structure, "iterables", structure)
    if isinstance(structure, Mapping):
        return [loader for part in structure.values() for loader in loaders_in(part)]
    if isinstance(structure, (list, tuple)):
        return [loader for part in structure for loader in loaders_in(part)]
    return [] if structure is None else [structure]


def rebuilt(structure: Any, size: int) -> Any:
    """The same loaders with another batch size; samplers, workers, collation and how they are combined are kept."""
    if not hasattr(structure, "iterables"):
        return _mapped(structure, lambda loader: _rebuilt_loader(loader, size))
    combined = copy.copy(structure)
    combined.flattened = [_rebuilt_loader(loader, size) for loader in structure.flattened]
    return combined


def _rebuilt_loader(loader: Any, size: int) -> Any:
    if type(loader) is not DataLoader or loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise _not_rebuilt(loader)
    settings = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not isinstance(loader.dataset, IterableDataset):
        settings["sampler"] = loader.sampler  # shuffling included
    if not settings["num_workers"]:
        del settings["prefetch_factor"]
    return DataLoader(loader.dataset, batch_size=size, **settings)


def _mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    structure = getattr(structure, "iterables", structure)
    if isinstance(structure, Mapping):
        return {name: _mapped(part, function) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_mapped(part, function) for part in structure]
    return function(structure)


def _data_of(loader: Any) -> Any:
    return getattr(loader, "dataset", None)


def _epoch_length(loader: Any) -> int | None:
    """Samples of an epoch, of all ranks: what the sampler draws, which may be a part of the data set."""
    data, sampler = _data_of(loader), getattr(loader, "sampler", None)
    drawn = sampler if _shows_samples(loader) and not isinstance(sampler, DistributedSampler) else None
    return next((len(one) for one in (drawn, data) if isinstance(one, Sized)), None)


def _shows_samples(loader: Any) -> bool:
    """Whether batches of any size can be made of the loader's samples by its `collate_fn`."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    return type(loader.batch_sampler) is BatchSampler and loader.dataset is not None


def _spread_samples(data: Any) -> Iterator[Any]:
    end = time.perf_counter() + LOOKING_SECONDS
    samples: Iterable[Any]
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        samples = itertools.islice(data, MOST_STREAMED_SAMPLES)
    else:
        count = min(len(data), MOST_SAMPLES)
        samples = (data[place * len(data) // count] for place in range(count))
    for sample in samples:
        yield sample
        if time.perf_counter() > end:
            return


def _copied(sample: Any) -> Any:
    """The sample in memory of its own: a row of a large tensor would count as all of it."""
    if isinstance(sample, torch.Tensor):
        return sample.detach().clone()
    if type(sample) is dict:
        return {name: _copied(part) for name, part in sample.items()}
    if type(sample) in (list, tuple):
        return type(sample)(_copied(part) for part in sample)
    return sample


def _cost(sample: Any) -> int:
    """What a sample weighs: bytes of tensors and arrays, characters of text."""
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, Mapping):
        return sum(_cost(part) for part in sample.values())
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, Sequence):
        return sum(_cost(part) for part in sample)
    size = getattr(sample, "nbytes", 0)
    return int(size) if isinstance(size, int) else 0
