"""Which part of a data set is read: one of its splits, and a sample of it that keeps groups in proportion."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from brim.data.base import Sample, Table
from brim.errors import RequestError, nearest_names
from brim.settings.caller import given, named, written

__all__ = ["choose_split", "held_out", "refuse_split", "stratified", "without_splits"]

_EVALUATED = (
    ("validation", "val", "valid", "dev"),
    ("test",),
)  # preferred first; one bracket: synonyms


def choose_split(available: Sequence[str], asked: str | None, *, where: str) -> str:
    """The split asked for; else the only one, else the validation or test split.

    `val` means `validation`, and also `val2014` where no other split starts like it. Anything else is a `RequestError`
    that names the splits present.
    """
    present = f"{where} has the splits {', '.join(available)}"
    if asked is None:
        if len(available) == 1:
            return available[0]
        for names in _EVALUATED:
            found = _meant(names, available)
            if found is not None:
                return found
        raise RequestError(f"{present}; name one with {written('split', 'NAME')}")
    names = next((names for names in _EVALUATED if asked.lower() in names), (asked.lower(),))
    found = asked if asked in available else _meant((asked.lower(), *names), available)
    if found is None:
        raise RequestError(f"{given('split', asked)}: {present}{nearest_names(asked, available)}")
    return found


def refuse_split(asked: str | None, *, where: str) -> None:
    """A `RequestError` if a split is asked for in a data set without splits."""
    if asked is not None:
        raise RequestError(
            f"{given('split', asked)}: {where} has no splits; leave {named('split')} out, or give that split's own path"
        )


def without_splits(read: Callable[[Path], Table]) -> Callable[[Path, str | None], Table]:
    """`read` for a `TableFormat` that has no splits: a split is a `RequestError`."""

    def read_all(path: Path, split: str | None) -> Table:
        refuse_split(split, where=str(path))
        return read(path)

    return read_all


def _meant(names: Sequence[str], available: Sequence[str]) -> str | None:
    for name in names:
        exact = [split for split in available if split.lower() == name]
        if exact:
            return exact[0]
    for name in names:
        numbered = [split for split in available if re.fullmatch(re.escape(name) + r"[-_]?\d+", split.lower())]
        if len(numbered) == 1:
            return numbered[0]
    return None


def stratified(samples: Sequence[Sample], count: int) -> tuple[Sample, ...]:
    """`count` of the samples, in order: groups in proportion (largest remainder), evenly spaced within each group.

    Without groups, evenly spaced over all samples. All of them if there are no more than `count`.
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
    """About `count` of the samples for validation, groups in proportion: whole recordings, where samples have one.

    At least one recording of each group is left for training. Where no group has two recordings, or samples have none,
    single samples are held out.
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
    """How many of each group: its exact share rounded down, plus one for the largest remainders."""
    total = sum(sizes)
    shares = [size * count // total for size in sizes]
    remainders = [size * count % total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -remainders[group])
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares
