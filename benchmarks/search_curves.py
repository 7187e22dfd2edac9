"""How many probes and out-of-memory errors the search for the largest size takes, over synthetic cost curves.

    python -m benchmarks.search_curves --count 20000

Needs no GPU: a probe is a lookup on the curve. Every answer is checked against the truth.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replay_engines import Look, search

BOUND = 4096
Bytes = Callable[[int], int]


def affine(draw: random.Random) -> Bytes:
    constant, slope = _constant(draw), _slope(draw)
    return lambda n: constant + slope * n


def quadratic(draw: random.Random) -> Bytes:
    constant, slope, curvature = _constant(draw), _slope(draw), int(10 ** draw.uniform(0, 4))
    return lambda n: constant + slope * n + curvature * n * n


def constant_dwarfs_slope(draw: random.Random) -> Bytes:
    constant, slope = int(10 ** draw.uniform(9, 12)), int(10 ** draw.uniform(0, 4))
    return lambda n: constant + slope * n


def slope_changes(draw: random.Random) -> Bytes:
    constant, before, at = _constant(draw), _slope(draw), draw.randint(2, 3000)
    after = max(1, int(before * 2 ** draw.uniform(-3, 3)))
    return lambda n: constant + before * min(n, at) + after * max(n - at, 0)


def staircase(draw: random.Random) -> Bytes:
    constant, rise, tread = _constant(draw), _slope(draw), draw.randint(2, 128)
    return lambda n: constant + rise * -(-n // tread)


def sloped_staircase(draw: random.Random) -> Bytes:
    constant, rise, tread = _constant(draw), _slope(draw) + 128, draw.randint(2, 128)
    slope = int(rise / tread * 10 ** draw.uniform(-2, 1)) + 1
    return lambda n: constant + slope * n + rise * -(-n // tread)


SHAPES = (affine, quadratic, constant_dwarfs_slope, slope_changes, staircase, sloped_staircase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="curves of each shape")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    print("| bytes | curves | wrong | probes: mean | 99th percentile | most | over 14 | OOM: mean | most |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        rows.append(measure(shape, arguments.count))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": rows}, indent=1))


def measure(shape: Callable[[random.Random], Bytes], count: int) -> dict[str, Any]:
    draw = random.Random(7)
    probes: list[int] = []
    ooms: list[int] = []
    wrong = 0
    while len(probes) < count:
        bytes_at = shape(draw)
        uniform, logarithmic = draw.randint(1, BOUND - 1), int(math.exp(draw.uniform(0, math.log(BOUND - 1))))
        limit = bytes_at(draw.choice([uniform, logarithmic]))
        truth = largest_by_bisection(bytes_at, limit)
        if truth >= BOUND:
            continue
        base = draw.choice([0, bytes_at(0), bytes_at(0) // 2])
        found, asked, failed = search(
            "largest", look_at(bytes_at, limit), limit=limit, base=base, last=BOUND, exact=True
        )
        wrong += found != truth
        probes.append(asked)
        ooms.append(failed)
    probes.sort()
    return {
        "shape": shape.__name__.replace("_", " "),
        "curves": count,
        "wrong": wrong,
        "probes_mean": sum(probes) / count,
        "probes_p99": probes[int(0.99 * count)],
        "probes_most": probes[-1],
        "over_14": sum(p > 14 for p in probes),
        "ooms_mean": sum(ooms) / count,
        "ooms_most": max(ooms),
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['shape']} | {row['curves']:,} | {row['wrong']} | {row['probes_mean']:.1f} | {row['probes_p99']} "
        f"| {row['probes_most']} | {row['over_14']} ({row['over_14'] / row['curves']:.2%}) | {row['ooms_mean']:.1f} "
        f"| {row['ooms_most']} |"
    )


def look_at(bytes_at: Bytes, limit: int) -> Callable[[int], Look]:
    return lambda size: Look(bytes_at(size) if bytes_at(size) <= limit else None)


def largest_by_bisection(bytes_at: Bytes, limit: int) -> int:
    low, high = 0, BOUND + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_at(middle) <= limit else (low, middle)
    return low


def _constant(draw: random.Random) -> int:
    return int(10 ** draw.uniform(1, 10))


def _slope(draw: random.Random) -> int:
    return int(10 ** draw.uniform(0, 7)) + 1


if __name__ == "__main__":
    main()
