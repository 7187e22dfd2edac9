"""Every replay of brim's size decisions in one command, saved so that two versions can be laid side by side.

    python -m benchmarks.replays --save after.json
    python -m benchmarks.replays --compare docs/measurements/replays-before.json after.json
    python -m benchmarks.replays --kinds live,training --save after.json      # a part: all but peaks takes a minute

Needs no GPU. Kinds: `largest` and `fastest` (brim find on synthetic curves), `stored` (brim find on curves that were
measured on an H200, with the forecast, with it off by a factor, and without), `card` (prompts through a model of the
card), `live` (batches of an evaluation under a limit), `training` (micro-batches, with an allocator that caches and
slow, noisy first seconds), `peaks` (forecasts of stored peaks, to the byte). Groups called `held out` are curves that
were not used for tuning. `of_best` is the true rate at the chosen size over the best one that fits, in `largest` the
size over the true one, in `card` and `live` the time at the best size over the time taken, search included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay_curves import (
    DATA,
    GIB,
    Curve,
    held_out_curves,
    stored_curves,
    tuned_cards,
    tuned_shapes,
    video_curves,
)
from benchmarks.replay_engines import Look, Sizes, forecast_peaks, live_sizes, search, training_sizes

SCHEMA = "brim.replays/1"
HELD_OUT = "held out"
LAST = 65_536
LARGEST_BOUND = 4096
LIVE_BATCHES = 48  # of the largest size that fits
MOST_BATCHES = 2000
FIRST = 2  # samples of a first batch
COLD = 1.6  # times as long: the first micro-batch at its size, while the allocator asks the driver for more
BUSY_SECONDS = 2.5  # at first, while the host has other work: up to 15 % longer, or by the length of a pause
TRAINING_WINDOWS = 30
WORSE = 0.01  # of `of_best`: what falls by more is named

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", help="run, and write the rows to this file")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these")
    parser.add_argument("--note", default="", help="what was run, for the file")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="print two files side by side")
    arguments = parser.parse_args()
    if arguments.save:
        rows = [row for kind in arguments.kinds.split(",") for row in run_kind(kind)]
        save(Path(arguments.save), rows, arguments.note)
    if arguments.compare:
        print(comparison(*(json.loads(Path(file).read_text())["rows"] for file in arguments.compare)))
    if not arguments.save and not arguments.compare:
        parser.error("give --save FILE or --compare BEFORE AFTER")


def run_kind(kind: str) -> Iterator[Row]:
    for group, case, found in KINDS[kind]():
        yield {"kind": kind, "group": group, "case": case, **found}


def save(file: Path, rows: Sequence[Row], note: str) -> None:
    """A line for each row: small, and a diff shows what changed."""
    from benchmarks.environment import environment

    head = json.dumps({"schema": SCHEMA, "note": note, "environment": environment()})[:-1]
    file.write_text(head + ', "rows": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n")


# --- the kinds: each gives group, case, and what came of it -----------------------------------------------------------

Found = Iterator[tuple[str, str, Row]]


def largest() -> Found:
    curves = [*tuned_shapes(), *((HELD_OUT, curve) for curve in held_out_curves())]
    for group, curve in curves:
        size, probes, ooms = search(
            "largest", looks(curve), limit=curve.limit, base=curve.base, last=LARGEST_BOUND, exact=True
        )
        yield group, curve.name, row(size, probes, ooms, size / curve.largest(LARGEST_BOUND))


def fastest() -> Found:
    for group, curves in (("cards", tuned_cards()), (HELD_OUT, held_out_curves())):
        for curve in curves:
            size, probes, ooms = search("fastest", looks(curve), limit=curve.limit, base=curve.base, last=LAST)
            yield group, curve.name, row(size, probes, ooms, curve.rate(size) / curve.best_rate(LAST))


def stored() -> Found:
    """Five workloads on an H200, with the forecast off by each factor."""
    from benchmarks import forecast_search
    from benchmarks.forecast_cases import build, case_named
    from brim.settings.sizes import parse_bytes

    environment, limit, curves = stored_curves()
    for name, points in curves.items():
        case, curve = case_named(name), forecast_search.Curve(points)
        assert case is not None
        base, model = forecast_search.forecast_of(lambda case=case: build(case, "cpu"), environment)  # type: ignore[misc]
        for factor in forecast_search.FACTORS:
            forecast = forecast_search.off_by(model, base, factor)
            size, probes, ooms = search("fastest", curve.look, limit=parse_bytes(limit), base=base, forecast=forecast)
            label = "no forecast" if factor is None else f"forecast × {factor:g}"
            yield label, name, row(size, probes, ooms, curve.rate(size) / curve.best_rate)


def card() -> Found:
    from benchmarks import live_sizes as model_of_the_card

    for repeats in (1, 2, 16):
        for seed in range(5):
            seconds, best, cap = model_of_the_card.automatic(repeats, seed)
            yield f"4,096 × {repeats}", f"seed {seed}", row(cap, None, 0, best / seconds)


def live() -> Found:
    """Batches that are all alike, found on the way; and a size by hand that is three times too large."""
    for group, curves in (("cards", tuned_cards()), (HELD_OUT, held_out_curves())):
        for curve in curves:
            biggest = curve.largest(LAST)
            items = LIVE_BATCHES * biggest
            ideal = items / curve.best_rate(items // 4)
            room: dict[str, Any] = {"limit_bytes": curve.limit, "base_bytes": curve.base}
            found = live_sizes(first=FIRST, ceiling=items // 4, **room)
            yield group, curve.name, live_run(curve, found, items, ideal)
            given = live_sizes(first=max(biggest // 4, 1), ceiling=3 * biggest, fixed=True, **room)
            yield f"given, {group}", curve.name, live_run(curve, given, items, items / curve.rate(biggest))


def training() -> Found:
    for limit in (24 * GIB, 136 * GIB):
        for curve in video_curves(limit):
            for window in (64, 128, 512):
                for seed in range(3):
                    yield f"{limit // GIB} GiB", f"{curve.name}, {window}, {seed}", training_run(curve, window, seed)
    for seed, curve in enumerate(held_out_curves()):
        yield HELD_OUT, curve.name, training_run(curve, (64, 128, 512)[seed % 3], seed)


def peaks() -> Found:
    """A case that was measured in several ways (in a fresh process, after other sizes) is numbered."""
    for file in sorted(DATA.glob("peaks-*.json")):
        seen: Counter[str] = Counter()
        for peak in forecast_peaks(str(file)):
            case = f"{peak['case']} at {peak['batch_size']}"
            seen[case] += 1
            found = {name: peak[f"forecast_{name}"] for name in ("allocated_bytes", "reserved_bytes")}
            yield file.stem, f"{case} ({seen[case]})" if seen[case] > 1 else case, found


KINDS: dict[str, Callable[[], Found]] = {
    "largest": largest, "fastest": fastest, "stored": stored, "card": card, "live": live, "training": training,
    "peaks": peaks,
}  # fmt: skip


def row(size: int, probes: int | None, ooms: int, of_best: float) -> Row:
    return {"size": size, "probes": probes, "ooms": ooms, "of_best": round(of_best, 4)}


def looks(curve: Curve) -> Callable[[int], Look]:
    """Probes of a curve: each size has its own noise, whatever was asked before."""

    def look(size: int) -> Look:
        if not curve.fits(size):
            return Look(None)
        return Look(curve.bytes_at(size), curve.timed(size, random.Random(f"{curve.name} {size}")))

    return look


def live_run(curve: Curve, sizes: Sizes, items: int, ideal: float) -> Row:
    """All items, under an allocator that holds what the largest batch took until one fails."""
    draw = random.Random(curve.name)
    left, seconds, ooms, cached, ran = items, 0.0, 0, 0, []
    while left:
        size = min(sizes.cap, left)
        taken = curve.timed(size, draw)
        seconds += taken
        if not curve.fits(size):
            ooms, cached = ooms + 1, 0
            sizes.ran_out(size)
            continue
        cached = max(cached, size)
        sizes.ran(size, taken, curve.bytes_at(cached))
        left -= size
        ran.append(size)
        if len(ran) == MOST_BATCHES:  # it stays where it is: the rest takes as long as this one did
            seconds += left / size * taken
            break
    return row(ran[-2] if len(ran) > 1 else ran[-1], None, ooms, ideal / seconds)


def training_run(curve: Curve, window: int, seed: int) -> Row:
    """Windows of samples that are all alike; a window that runs out of memory begins again."""
    sizes = training_sizes(window=window, limit_bytes=curve.limit)
    draw = random.Random(seed)
    cached = seen = settled_after = ooms = 0
    clock = 0.0
    for _ in range(TRAINING_WINDOWS):
        sizes.begin_window()
        left = window
        while left:
            cached = 0 if sizes.starts_empty else cached
            length = sizes.next_length(left)
            if not curve.fits(length):
                ooms, cached, left = ooms + 1, 0, window
                sizes.ran_out(length)
                continue
            cold, cached = length > cached, max(cached, length)
            seconds = None
            if not sizes.settled:
                seconds = slow_start(curve.timed(length, draw) * (COLD if cold else 1.0), clock, draw)
                clock += seconds
            sizes.ran(length, seconds, curve.bytes_at(cached))
            left, seen = left - length, seen + length
            if sizes.settled and not settled_after:
                settled_after = seen
        sizes.end_window()
    best = curve.best_rate(window)
    return {
        **row(sizes.kept, None, ooms, curve.rate(sizes.kept) / best),
        "search_seconds": round(settled_after / best, 2),
    }


def slow_start(seconds: float, clock: float, draw: random.Random) -> float:
    """A run's first seconds: slower, with pauses."""
    if clock >= BUSY_SECONDS:
        return seconds
    return seconds * draw.uniform(1.0, 1.15) + (0.2 if draw.random() < 0.25 else 0.0)


# --- two files side by side -------------------------------------------------------------------------------------------


def comparison(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Markdown: a line for each group, then every case that got worse."""
    pairs = paired(before, after)
    lines = [
        "| kind | group | cases | same size | of best: mean | lowest | probes: mean | OOM | better | worse |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    worse: list[str] = []
    for (kind, group), both in groups(pairs).items():
        if kind != "peaks":
            lines.append(group_line(kind, group, both))
            worse += [worse_line(*pair) for pair in both if is_worse(*pair)]
    lines += peak_lines(pairs)
    missing = len(after) - len(pairs), len(before) - len(pairs)
    lines.append(f"\nOnly in the second file: {missing[0]}; only in the first: {missing[1]}.")
    if worse:
        lines += ["", "| worse | size | of best | OOM |", "|---|---|---|---|", *worse]
    return "\n".join(lines)


def paired(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    key = ("kind", "group", "case")
    known = {tuple(one[name] for name in key): one for one in before}
    return [(known[of], one) for one in after if (of := tuple(one[name] for name in key)) in known]


def groups(pairs: Sequence[tuple[Row, Row]]) -> dict[tuple[str, str], list[tuple[Row, Row]]]:
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for old, new in pairs:
        found.setdefault((new["kind"], new["group"]), []).append((old, new))
    return found


def group_line(kind: str, group: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    means = " → ".join(f"{statistics.mean(one['of_best'] for one in side):.4f}" for side in sides)
    lowest = " → ".join(f"{min(one['of_best'] for one in side):.3f}" for side in sides)
    probes = "—"
    if all(one["probes"] is not None for side in sides for one in side):
        probes = " → ".join(f"{statistics.mean(one['probes'] for one in side):.2f}" for side in sides)
    ooms = " → ".join(str(sum(one["ooms"] for one in side)) for side in sides)
    same = sum(old["size"] == new["size"] for old, new in pairs)
    better, behind = sum(is_worse(new, old) for old, new in pairs), sum(is_worse(*pair) for pair in pairs)
    return (
        f"| {kind} | {group} | {len(pairs)} | {same} | {means} | {lowest} | {probes} | {ooms} | {better} | {behind} |"
    )


def is_worse(old: Row, new: Row) -> bool:
    """Slower by more than the threshold, or as fast with more failures."""
    if new["of_best"] < old["of_best"] - WORSE:
        return True
    return bool(new["ooms"] > old["ooms"] and new["of_best"] <= old["of_best"] + WORSE)


def worse_line(old: Row, new: Row) -> str:
    cells = " | ".join(f"{old[name]} → {new[name]}" for name in ("size", "of_best", "ooms"))
    return f"| {new['kind']}, {new['group']}: {new['case']} | {cells} |"


def peak_lines(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    both = [pair for pair in pairs if pair[1]["kind"] == "peaks"]
    if not both:
        return []
    off = [
        max(abs(new[name] - old[name]) for name in ("allocated_bytes", "reserved_bytes")) / 2**20 for old, new in both
    ]
    changed = [f"{new['case']} ({mib:+,.1f} MiB)" for (_, new), mib in zip(both, off, strict=True) if mib >= 1]
    line = f"\nStored peaks: {len(both)} forecasts, {sum(mib == 0 for mib in off)} the same to the byte"
    return [f"{line}, {len(changed)} off by a MiB or more{': ' if changed else ''}{', '.join(changed)}."]


if __name__ == "__main__":
    main()
