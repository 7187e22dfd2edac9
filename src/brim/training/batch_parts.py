"""A collated batch cut into parts along the samples: tensors by their first dimension, lists of texts by their places.

What a `DataLoader` makes: tensors, and lists, tuples and mappings of them, with everything that has one entry for each
sample. Knows nothing of what the parts are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from brim.errors import RequestError
from brim.memory.transfer import mapping_like

__all__ = ["part_of", "samples_in"]


def samples_in(batch: Any) -> int:
    """How many samples a batch has; one that cannot be cut is a `RequestError`."""
    lengths = set(_lengths(batch))
    if not lengths:
        raise RequestError(
            f"a batch is a {type(batch).__name__} without a tensor that has one row for each sample; give the data set "
            "and effective_batch_size=, and brim puts micro-batches together with collate_fn="
        )
    if isinstance(batch, list) and not _holds_tensors(batch) and all(isinstance(one, tuple) for one in batch):
        raise RequestError(
            f"a batch is a list of {len(batch)} tuples without a tensor: its columns, as torch's default_collate makes "
            "them of texts, or its samples; return a dictionary of columns from collate_fn="
        )
    if len(lengths) > 1:
        shown = ", ".join(str(length) for length in sorted(lengths))
        raise RequestError(
            f"the tensors of a batch have different first dimensions ({shown}), so it cannot be cut into samples; give "
            "the data set and effective_batch_size=, and brim puts micro-batches together with collate_fn="
        )
    return lengths.pop()


def part_of(batch: Any, start: int, stop: int) -> Any:
    """The samples [start, stop) of a batch; what does not belong to single samples is in every part."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: part_of(value, start, stop) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if not _holds_tensors(batch):
            return batch[start:stop]
        parts = [part_of(value, start, stop) for value in batch]
        if isinstance(batch, list):
            return parts
        return batch._make(parts) if hasattr(batch, "_make") else tuple(parts)
    return batch


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield batch.shape[0]
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, (list, tuple)):
        if _holds_tensors(batch):
            for value in batch:
                yield from _lengths(value)
        else:
            yield len(batch)


def _holds_tensors(values: Any) -> bool:
    """Whether it is a container of columns, not a column of texts or numbers."""
    return any(
        isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, (list, tuple)) and _holds_tensors(value))
        for value in values
    )
