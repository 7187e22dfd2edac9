"""A part of a data set that stands for the whole: every kind of sample in its proportion, the same each time."""

from __future__ import annotations

from collections.abc import Sequence

from brim.data.base import Sample
from brim.errors import RequestError

__all__ = ["stratified"]


def stratified(samples: Sequence[Sample], count: int) -> tuple[Sample, ...]:
    """`count` of the samples in their order: groups in proportion (largest remainder), spread evenly over each group.

    Without groups they are evenly spaced over all. All samples where there are no more than `count`.
    """
    if count < 1:
        raise RequestError(f"--limit {count}: it must be at least 1")
    if count >= len(samples):
        return tuple(samples)
    groups: dict[str | None, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(place)
    shares = _shares([len(places) for places in groups.values()], count)
    chosen = [
        places[(2 * step + 1) * len(places) // (2 * share)]  # the middle of each of `share` equal parts
        for places, share in zip(groups.values(), shares, strict=True)
        for step in range(share)
    ]
    return tuple(samples[place] for place in sorted(chosen))


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many each group gives: its exact share rounded down, and the rest to the largest remainders, first come."""
    total = sum(sizes)
    shares = [size * count // total for size in sizes]
    remainders = [size * count % total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -remainders[group])
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares
