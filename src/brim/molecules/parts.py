"""The six parts of a detection data set: in- and out-of-distribution, to train on, to validate on, to test on.

Knows rows, not what they are: molecules and features are divided in the same way, and always in the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from brim.errors import RequestError, plural

__all__ = ["PARTS", "FeatureSet", "Part", "divided"]

Part = Literal["train_in", "train_out", "val_in", "val_out", "test_in", "test_out"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features by part, `[rows, width]` in float32, and the names of their rows."""

    name: str
    encoder: str  # `features` where the rows came as such
    features: Mapping[Part, torch.Tensor]
    ids: Mapping[Part, Sequence[str]]
    labels: Mapping[Part, Sequence[Any]] | None = None  # classes of the in-distribution parts, where they are known

    def __post_init__(self) -> None:
        widths = {part: rows.shape[1] for part, rows in self.features.items()}
        if len(set(widths.values())) > 1:
            listed = ", ".join(f"{part} {width}" for part, width in widths.items())
            raise RequestError(f"{self.name}: features of different width ({listed}); encode both sides alike")
        for part, rows in self.features.items():
            if len(rows) == 0:
                raise RequestError(f"{self.name}: {part} is empty; detection needs rows of both kinds in every part")
            bad = ~rows.isfinite().all(1)
            if bool(bad.any()):
                first = self.ids[part][int(bad.nonzero()[0])]
                raise RequestError(
                    f"{self.name}: {plural(int(bad.sum()), 'row')} of {part} not finite, such as {first}"
                )

    @property
    def width(self) -> int:
        """Features of a row."""
        return int(self.features["train_in"].shape[1])

    def counts(self) -> dict[str, int]:
        """Rows of each part."""
        return {part: len(self.features[part]) for part in PARTS}


def divided(count: int, shares: Sequence[float], *, seed: int, name: str) -> list[list[int]]:
    """`count` rows dealt at random, always in the same way, in these shares; every share has at least one row."""
    if count < len(shares):
        raise RequestError(f"{name} has {plural(count, 'row')}, too few to divide into {len(shares)} parts")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    sizes = [max(1, round(share * count)) for share in shares[1:]]
    while sum(sizes) > count - 1:
        sizes[sizes.index(max(sizes))] -= 1
    ends = [count - sum(sizes)]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [sorted(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
