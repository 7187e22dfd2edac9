"""Lists of knob values as people write them, and the points they make. Pure: no torch, no model.

parse_values("2-13")                      → 2, 3 … 13
parse_values("8,16,32")                   → 8, 16, 32
make_points({"max_crops": (2, 3), "max_new_tokens": (8, 16)}, pairing="cross")      → four points
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from brim.errors import RequestError
from brim.settings.caller import given

__all__ = ["Pairing", "Sampling", "make_points", "parse_values", "sample_points", "start_from"]

Pairing = Literal["cross", "zip"]
Sampling = Literal["stratified", "lhs", "boundary"]
Point = dict[str, Any]

MOST_VALUES = 100_000


def parse_values(text: str) -> tuple[str, ...]:
    """The values of a list: single ones, and ranges of whole numbers such as 2-13 or 2-13:2 (every second).

    A `ValueError` says what is wrong, and leaves it to others to name the setting.
    """
    values: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        span = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part)
        if span is None:
            values.append(part)
            continue
        first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
        if first > last or step < 1:
            raise ValueError(f"the range {part} is empty; write it from small to large")
        if (last - first) // step >= MOST_VALUES:
            raise ValueError(f"the range {part} has more than {MOST_VALUES:,} values")
        values += [str(value) for value in range(first, last + 1, step)]
    if not values:
        raise ValueError("it names no value; write for instance 2-13 or 8,16")
    repeated = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is there twice")
    return tuple(values)


def start_from(values: Sequence[Any], first: Any) -> tuple[Any, ...]:
    """The values from this one on; one above all of them is a `RequestError`."""
    kept = tuple(value for value in values if value >= first)
    if not kept:
        raise RequestError(f"{given('start_from', first)}: it is above every value ({', '.join(map(str, values))})")
    return kept


def make_points(lists: Mapping[str, Sequence[Any]], *, pairing: Pairing = "cross") -> list[Point]:
    """Every combination, or the n-th of each list with the n-th of the others."""
    if pairing not in get_args(Pairing):
        raise RequestError(f"{given('pairing', pairing)}: it must be one of {', '.join(get_args(Pairing))}")
    names = list(lists)
    if pairing == "cross":
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*lists.values())]
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise RequestError(
            f"{given('pairing', 'zip')}: the lists differ in length ({told}); give as many values of each, or cross"
        )
    return [dict(zip(names, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def sample_points(lists: Mapping[str, Sequence[Any]], count: int, *, strategy: Sampling, seed: int = 0) -> list[Point]:
    """So many points of the whole space, the same ones every time.

    `boundary` takes the corners, the middle, then spreads; `lhs` uses every value of every knob about equally often
    (Latin hypercube); `stratified` cuts the space, in its order, into parts of equal size and takes one point of each.
    """
    if strategy not in get_args(Sampling):
        raise RequestError(f"{given('sample', strategy)}: it must be one of {', '.join(get_args(Sampling))}")
    if count < 1:
        raise RequestError(f"{given('num_points', count)}: it must be at least 1")
    whole = make_points(lists)
    if count >= len(whole):
        return whole
    draw = random.Random(seed)
    if strategy == "stratified":
        return _stratified(whole, count, draw)
    chosen = _corners(lists) if strategy == "boundary" else []
    return _unique([*chosen, *_latin(lists, count, draw), *draw.sample(whole, len(whole))])[:count]


def _stratified(whole: Sequence[Point], count: int, draw: random.Random) -> list[Point]:
    edges = [len(whole) * part // count for part in range(count + 1)]
    return [whole[draw.randrange(low, high)] for low, high in itertools.pairwise(edges)]


def _corners(lists: Mapping[str, Sequence[Any]]) -> list[Point]:
    ends = {name: (values[0], values[-1]) for name, values in lists.items()}
    middle = {name: values[len(values) // 2] for name, values in lists.items()}
    return [*make_points(ends), middle]


def _latin(lists: Mapping[str, Sequence[Any]], count: int, draw: random.Random) -> list[Point]:
    columns: dict[str, list[Any]] = {}
    for name, values in lists.items():
        column = [values[place * len(values) // count] for place in range(count)]
        draw.shuffle(column)
        columns[name] = column
    return [{name: column[place] for name, column in columns.items()} for place in range(count)]


def _unique(points: Sequence[Point]) -> list[Point]:
    return list({tuple(point.items()): point for point in points}.values())
