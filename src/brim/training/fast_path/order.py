"""Which rows each step of an epoch takes: the same for a run that is alone and for one in a stack.

Rows come in streams: one for supervised data; in- and out-of-distribution rows for preference training. An epoch is
one pass over the longest stream; a shorter one starts again as often as needed, shuffled anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import torch

from brim.errors import RequestError

__all__ = ["Counts", "EpochPlan", "epoch_orders"]

Counts = tuple[int, ...]  # rows of each stream in one step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The steps of an epoch: all alike but the last, which takes what is left of the longest stream.

    A step takes `batch_size` rows of each stream, and no more than a stream has. With `matched` every stream gives as
    many rows as the longest one, whatever its length.
    """

    lengths: tuple[int, ...]
    batch_size: int
    matched: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise RequestError(f"there is nothing to train on: streams of {self.lengths} rows")
        if self.batch_size < 1:
            raise RequestError(f"a batch of {self.batch_size} rows: it must be at least 1")

    @property
    def size(self) -> int:
        """Rows of the longest stream in a full step: never more than there are."""
        return min(self.batch_size, max(self.lengths))

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return math.ceil(max(self.lengths) / self.size)

    @property
    def full(self) -> Counts:
        """Rows of each stream in every step but perhaps the last."""
        return self._counts(self.size)

    @property
    def last(self) -> Counts:
        """Rows of each stream in the last step."""
        return self._counts(max(self.lengths) - (self.steps - 1) * self.size)

    @property
    def spans(self) -> tuple[int, ...]:
        """How many rows of each stream an epoch takes in all."""
        return tuple((self.steps - 1) * full + last for full, last in zip(self.full, self.last, strict=True))

    def counts(self, step: int) -> Counts:
        """Rows of each stream in one step."""
        return self.last if step == self.steps - 1 else self.full

    def _counts(self, rows: int) -> Counts:
        return tuple(rows if self.matched else min(rows, length) for length in self.lengths)


def epoch_orders(plan: EpochPlan, *, seed: int, epoch: int) -> list[torch.Tensor]:
    """For each stream the rows in the order in which the epoch takes them, `[span]`; numbered through over all streams.

    The order depends on seed, epoch and stream alone, so every path, and a run begun in the middle, sees the same.
    """
    starts = _starts(plan.lengths)
    return [
        _shuffled(length, span, key=f"{seed}/{epoch}/{stream}") + starts[stream]
        for stream, (length, span) in enumerate(zip(plan.lengths, plan.spans, strict=True))
    ]


def _shuffled(length: int, span: int, *, key: str) -> torch.Tensor:
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator().manual_seed(number)
    passes = [torch.randperm(length, generator=generator) for _ in range(math.ceil(span / length))]
    return torch.cat(passes)[:span]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:stream]) for stream in range(len(lengths))]
