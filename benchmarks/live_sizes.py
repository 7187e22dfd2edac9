"""How close `-b auto` comes to the best fixed cap, replayed on a model of the card: no GPU, a second's work.

    python -m benchmarks.live_sizes
    python -m benchmarks.live_sizes --json results.json

Times are those of an H200 with the model of benchmarks/prompts.py, fitted to a handful of measured batches: so much a
prompt token (more for long prompts), so much a decode step and cached token, so much host time a batch, which hides
behind the device once batches overlap. The real runs are in benchmarks/eval.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from pathlib import Path

from benchmarks.replay_engines import Sizes, live_sizes

NEW_TOKENS = 16
CAPS = (64, 128, 192, 256, 384, 512, 768, 1024)
HOST_BATCH, HOST_TOKEN, HOST_SAMPLE = 0.08, 1.2e-7, 6e-5  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    print("| prompts | best fixed cap | seconds | auto, seconds | auto over best |")
    print("|---|---|---|---|---|")
    for repeats in (1, 2, 16):
        cap, seconds = best_fixed(repeats)
        runs = sorted(automatic(repeats, seed)[0] for seed in range(5))
        rows.append({"prompts": 4096 * repeats, "best_cap_ki": cap, "best_seconds": seconds, "auto_seconds": runs})
        print(f"| 4,096 × {repeats} | {cap} Ki | {seconds:.2f} | {runs[0]:.2f} to {runs[-1]:.2f} "
              f"| {runs[0] / seconds:.3f} to {runs[-1] / seconds:.3f} |")  # fmt: skip
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": rows}, indent=1))


@functools.cache
def lengths() -> tuple[int, ...]:
    from benchmarks.prompts import prompts

    return tuple(len(prompt) + NEW_TOKENS for prompt in prompts())


@functools.cache
def best_fixed(repeats: int) -> tuple[int, float]:
    """The fastest of the fixed caps, in Ki tokens, and its seconds."""
    costs = [*lengths()] * repeats
    fixed = {cap: replay(costs, live_sizes(first=cap * 1024, ceiling=cap * 1024, fixed=True)) for cap in CAPS}
    best = min(fixed, key=fixed.__getitem__)
    return best, fixed[best]


def automatic(repeats: int, seed: int) -> tuple[float, float, int]:
    """Seconds with the cap found on the way, those of the best fixed one, and the cap at the end."""
    costs = [*lengths()] * repeats
    first = 2 * max(costs)
    sizes = live_sizes(first=first, ceiling=max(sum(costs) // 4, first))
    return replay(costs, sizes, seed=seed), best_fixed(repeats)[1], sizes.cap


def replay(costs: list[int], sizes: Sizes, *, seed: int = 0) -> float:
    """Seconds for all items, host and device on a timeline each."""
    from brim.running.work_queue import WorkQueue, padded_cost

    noise = random.Random(seed)
    queue = WorkQueue(costs, range(len(costs)))
    host = device = landed = 0.0
    flight: tuple[list[int], float, float] | None = None

    def land(batch: list[int], started: float, ended: float) -> None:
        nonlocal host, landed
        host = max(host, ended)
        costliest = max(costs[item] for item in batch)
        sizes.ran(padded_cost(costs[i] for i in batch), host - max(started, landed), None, costliest)
        landed = host
        host += len(batch) * HOST_SAMPLE

    while queue or flight is not None:
        following = None
        if queue:
            batch = queue.take(sizes.cap)
            length = costs[batch[0]] - NEW_TOKENS
            started = host
            host += HOST_BATCH + len(batch) * length * HOST_TOKEN
            device = max(device, host - 0.6 * HOST_BATCH) + _device_seconds(len(batch), length) * noise.uniform(
                0.98, 1.02
            )
            following = (batch, started, device)
        if flight is not None:
            land(*flight)
        flight = following
        if flight is not None and not sizes.overlaps:
            land(*flight)
            flight = None
    return max(host, device)


def _device_seconds(rows: int, length: int) -> float:
    prefill = rows * length * 1.5e-6 * (0.8 + length / 2000)
    step = 0.0015 + rows * (length + NEW_TOKENS) * 27e-9
    return 0.008 + prefill + (NEW_TOKENS - 1) * step


if __name__ == "__main__":
    main()
