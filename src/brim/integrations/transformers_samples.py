"""The costliest sample of a trainer's data in batches, collated as its own loader would.

Costs are read from the columns of a data set of `datasets` where it has lists of tokens, else from samples themselves:
of many, from some that lie evenly among them. A longer one that was not seen may come later: then its batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from brim.errors import RequestError
from brim.settings.caller import named

__all__ = ["CostliestSamples"]

MOST_SAMPLES_SEEN = 4096  # of data whose costs are not in a column
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


class CostliestSamples:
    """The samples of some data, the costliest first, and worst-case batches of them."""

    def __init__(self, order: Sequence[int], fetch: Callable[[int], Any], collate: Callable[[list[Any]], Any]) -> None:
        self.order = order
        self._fetch = fetch
        self._collate = collate

    @classmethod
    def of(
        cls, trainer: Any, dataset: Any, description: str, given: Sequence[Any] | None, parameter: str
    ) -> CostliestSamples:
        """Of a data set of the trainer, or of samples that the caller names (`parameter`) in its place."""
        plain = trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)
        if given is not None:
            if isinstance(given, (Mapping, str)) or not hasattr(given, "__getitem__") or len(given) == 0:
                raise RequestError(f"{named(parameter)}: give a list of samples, the longest that will come")
            return cls(sorted(range(len(given)), key=lambda place: -item_cost(given[place])), given.__getitem__, plain)
        if dataset is None:
            raise RequestError(
                f"the trainer has no {description.lower()} data; pass {named(parameter)}, a list of the longest "
                "samples that will come"
            )
        if isinstance(dataset, Mapping):
            sets = [cls.of(trainer, one, description, None, parameter) for one in dataset.values()]
            return max(sets, key=lambda one: item_cost(one._fetch(one.order[0])))
        by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not by_number:
            raise RequestError(
                f"{type(dataset).__name__} has no length or no samples by number, so its longest are not known; pass "
                f"{named(parameter)}, a list of the longest samples that will come"
            )
        if len(dataset) == 0:
            raise RequestError(f"the {description.lower()} data has no samples: there is nothing to try sizes on")
        if type(dataset).__module__.partition(".")[0] == "datasets":
            dataset = trainer._remove_unused_columns(dataset, description=description)
            plain = trainer.data_collator
        return cls(_costliest_first(dataset), dataset.__getitem__, plain)

    def batch(self, size: int) -> Any:
        """The costliest sample so many times, but the last is the least costly: padded, as a batch of real data is.

        A batch without padding has no mask, and attention runs otherwise without one.
        """
        numbers = [self.order[0]] * max(size - 1, 1) + [self.order[-1]] * (size > 1)
        return self._collate([self._fetch(number) for number in numbers])


def item_cost(sample: Any) -> int:
    """What a sample weighs, as far as that shows without a model: elements of its tensors, entries of its lists."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, Mapping):
        if all(name in sample for name in _IDS[1:]):
            return _pair_cost({name: item_cost(sample[name]) for name in _IDS if name in sample})
        if "input_ids" in sample:
            return item_cost(sample["input_ids"])
        return sum(item_cost(value) for value in sample.values())
    if isinstance(sample, str):
        return len(sample)
    size = getattr(sample, "size", None)  # an array
    if isinstance(size, int):
        return size
    if isinstance(sample, (list, tuple)):
        return sum(item_cost(value) for value in sample) if sample and not _is_number(sample[0]) else len(sample)
    return 1


def _costliest_first(dataset: Any) -> Sequence[int]:
    costs = _column_costs(dataset)
    if costs is None:
        apart = max(math.ceil(len(dataset) / MOST_SAMPLES_SEEN), 1)
        numbers: Sequence[int] = range(0, len(dataset), apart)
        costs = {number: item_cost(dataset[number]) for number in numbers}
    return sorted(costs, key=lambda number: -costs[number])


def _column_costs(dataset: Any) -> dict[int, int] | None:
    """The cost of every sample, from columns of lists; None where the data has none or has a format of its own."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return None
    lists = [name for name, kind in features.items() if type(kind).__name__ in ("List", "LargeList", "Sequence")]
    if "input_ids" in lists:
        lists = ["input_ids"]
    if not lists:
        return None
    table = dataset.select_columns(lists).with_format("arrow")[:]
    lengths: dict[str, list[int]] = {}
    for name in lists:
        chunks = table.column(name).chunks
        if not all(hasattr(chunk, "value_lengths") for chunk in chunks):
            return None
        lengths[name] = [length or 0 for chunk in chunks for length in chunk.value_lengths().to_pylist()]
    rows = (dict(zip(lists, values, strict=True)) for values in zip(*lengths.values(), strict=True))
    pairs = all(name in lists for name in _IDS[1:])
    return {number: _pair_cost(row) if pairs else sum(row.values()) for number, row in enumerate(rows)}


def _pair_cost(lengths: Mapping[str, int]) -> int:
    """Of a preference: both sequences are padded to the longer one."""
    return lengths.get("prompt_ids", 0) + max(lengths["chosen_ids"], lengths["rejected_ids"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
