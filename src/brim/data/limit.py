"""A part of a data set that stands for the whole: every kind of sample in its proportion, the same each time."""

from __future__ import annotations

from collections.abc import Sequence

from brim.data.base import Sample
from brim.errors import RequestError
from brim.settings.caller import given

__all__ = ["held_out", "stratified"]


def stratified(samples: Sequence[Sample], count: int) -> tuple[Sample, ...]:
    """`count` of the samples in their order: groups in proportion (largest remainder), spread evenly over each group.

    Without groups they are evenly spaced over all. All samples where there are no more than `count`.
    """
    if count < 1:
        raise RequestError(f"{given('limit', count)}: it must be at least 1")
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


def held_out(samples: Sequence[Sample], count: int) -> tuple[Sample, ...]:
    """About `count` of the samples, every group in proportion: whole recordings, where samples name theirs.

    One recording of each group stays, so that there is something to learn it from. Where no group has a second one,
    single samples are held out, as where samples name no recording.
    """
    recordings: dict[tuple[str | None, str], list[Sample]] = {}
    for sample in samples:
        recordings.setdefault(_recording(sample), []).append(sample)
    stays = {group: (group, name) for group, name in recordings}  # the last of each group
    free = [members[0] for key, members in recordings.items() if key != stays[key[0]]]
    if not free or all(sample.recording is None for sample in samples):
        return stratified(samples, count)
    share = max(round(count * len(recordings) / len(samples)), 1)
    chosen = {_recording(sample) for sample in stratified(free, share)}
    return tuple(sample for sample in samples if _recording(sample) in chosen)


def _recording(sample: Sample) -> tuple[str | None, str]:
    return sample.group, sample.recording or f"sample {sample.id}"


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many each group gives: its exact share rounded down, and the rest to the largest remainders, first come."""
    total = sum(sizes)
    shares = [size * count // total for size in sizes]
    remainders = [size * count % total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -remainders[group])
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares
