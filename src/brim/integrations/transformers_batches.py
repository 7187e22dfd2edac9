"""A trainer's collated batch as samples: how many it has, a part of them, what a part weighs, and answers put together.

A pair of a preference batch is one sample: TRL puts all chosen sequences first and all rejected ones after them. Knows
tensors and mappings only, no trainer and no library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from brim.errors import RequestError
from brim.workloads.base import leading_length

__all__ = ["IGNORED_LABEL", "BatchLayout", "joined_answers", "label_weight"]

IGNORED_LABEL = -100
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # of sequences that were put behind each other in one row


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the samples of one batch lie in its tensors; `obstacle` says why they cannot be taken apart."""

    samples: int
    rows: int  # leading dimension: the samples, or twice as many of pairs
    obstacle: str | None = None

    @classmethod
    def of(cls, batch: Any, *, paired: bool) -> BatchLayout:
        """The layout of a collated batch, pairs being `[chosen, rejected]` one half after the other."""
        try:
            rows = _leading(batch)
        except RequestError:
            return cls(samples=1, rows=1, obstacle="it has no tensor with a dimension for samples")
        if not isinstance(batch, Mapping):
            return cls(samples=rows, rows=rows, obstacle=f"it is a {type(batch).__name__}, not a mapping")
        samples = rows // 2 if paired else rows
        layout = cls(samples=samples, rows=rows)
        flattened = [name for name in _FLATTENED if name in batch]
        if flattened or _restarts(batch.get("position_ids")):
            shown = flattened[0] if flattened else "position_ids"
            why = f"its sequences lie behind each other in one row ({shown}), without padding"
            return dataclasses.replace(layout, obstacle=why)
        if paired and rows % 2:
            return dataclasses.replace(layout, obstacle=f"it has {rows} rows, which are no pairs")
        for name, value in batch.items():
            if (found := layout._misfit(value)) is not None:
                why = f"{name} has {found} entries for {samples} samples"
                return dataclasses.replace(layout, obstacle=why)
        return layout

    def part(self, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The samples from `start` to before `stop`, padded as they were; what has no samples is passed on."""
        return {name: self._part_of(value, start, stop) for name, value in batch.items()}

    def _misfit(self, value: Any) -> int | None:
        """The number of entries of something that has neither one for each row nor one for each sample."""
        if isinstance(value, Mapping):
            return next((found for one in value.values() if (found := self._misfit(one)) is not None), None)
        length = _entries(value)
        return None if length is None or length in (self.rows, self.samples) else length

    def _part_of(self, value: Any, start: int, stop: int) -> Any:
        if isinstance(value, Mapping):
            return {name: self._part_of(one, start, stop) for name, one in value.items()}
        length = _entries(value)
        if length is None:
            return value
        first = value[start:stop]
        if length == self.samples:
            return first
        second = value[self.samples + start : self.samples + stop]
        return torch.cat([first, second]) if isinstance(value, torch.Tensor) else [*first, *second]


def _restarts(positions: Any) -> bool:
    """Whether positions of a single row begin anew inside it: several sequences, without anything else that says so."""
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
        return False
    return bool(positions[0, 1:].eq(0).any())


def _entries(value: Any) -> int | None:
    """How many entries something has along the batch; None for what has no such dimension."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() > 0 else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _leading(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[0]) if isinstance(ids, torch.Tensor) and ids.dim() > 0 else leading_length(batch)


def label_weight(batch: Mapping[str, Any], samples: int, *, shifted: bool) -> float:
    """What a batch counts in a mean over labels: those that are not ignored; without such labels, its samples."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return float(samples)
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return float(labels.ne(IGNORED_LABEL).sum())


def joined_answers(parts: Sequence[Any], fractions: Sequence[float], *, paired: bool) -> Any:
    """Logits or labels of the parts of a batch as the whole batch would have given them.

    Nested tuples and mappings are joined member by member; a single number becomes the weighted mean. Generated
    answers of different lengths are filled with ignored labels, as transformers fills those of different batches.
    """
    first = parts[0]
    join: Callable[[Sequence[Any]], Any] = lambda members: joined_answers(members, fractions, paired=paired)  # noqa: E731
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)(join(members) for members in zip(*parts, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    if first.dim() == 0:
        return sum(part * fraction for part, fraction in zip(parts, fractions, strict=True) if fraction)
    if first.dim() > 1 and len({part.shape[1] for part in parts}) > 1:
        parts = _filled(parts)
    if not paired or any(part.shape[0] % 2 for part in parts):
        return torch.cat(list(parts))
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


def _filled(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All as long as the longest in their second dimension."""
    longest = max(part.shape[1] for part in parts)
    full = [part.new_full((part.shape[0], longest, *part.shape[2:]), IGNORED_LABEL) for part in parts]
    for whole, part in zip(full, parts, strict=True):
        whole[:, : part.shape[1]] = part
    return full
