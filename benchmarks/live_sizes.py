"""How close `-b auto` comes to the best fixed cap, replayed on a model of the card: no GPU, a second's work.

    python -m benchmarks.live_sizes

Times are those of an H200 with the model of benchmarks/prompts.py, fitted to a handful of measured batches: so much a
prompt token (more for long prompts), so much a decode step and cached token, so much host time a batch, which hides
behind the device once batches overlap. The real runs are in benchmarks/eval.py.
"""

from __future__ import annotations

import random

NEW_TOKENS = 16
CAPS = (64, 128, 192, 256, 384, 512, 768, 1024)
HOST_BATCH, HOST_TOKEN, HOST_SAMPLE = 0.08, 1.2e-7, 6e-5  # seconds


def main() -> None:
    from benchmarks.prompts import prompts

    from brim.sizing.live import LiveSizer

    lengths = [len(prompt) + NEW_TOKENS for prompt in prompts()]
    print("| prompts | best fixed cap | seconds | auto, seconds | auto over best |")
    print("|---|---|---|---|---|")
    for repeats in (1, 2, 16):
        costs = lengths * repeats
        fixed = {cap: replay(costs, LiveSizer(first=cap * 1024, ceiling=cap * 1024, grows=False)) for cap in CAPS}
        best = min(fixed, key=fixed.__getitem__)
        first = 2 * max(costs)
        runs = [replay(costs, LiveSizer(first=first, ceiling=max(sum(costs) // 4, first)), seed=s) for s in range(5)]
        worst = max(runs)
        print(f"| 4,096 × {repeats} | {best} Ki | {fixed[best]:.2f} | {min(runs):.2f} to {worst:.2f} "
              f"| {min(runs) / fixed[best]:.3f} to {worst / fixed[best]:.3f} |")  # fmt: skip


def replay(costs: list[int], sizer: object, *, seed: int = 0) -> float:
    """Seconds for all items under a sizer, host and device on a timeline each."""
    from brim.running.queue import WorkQueue, padded_cost
    from brim.sizing.live import LiveSizer
    from brim.sizing.sizer import Trial

    assert isinstance(sizer, LiveSizer)
    noise = random.Random(seed)
    queue = WorkQueue(costs, range(len(costs)))
    host = device = landed = 0.0
    flight: tuple[list[int], float, float] | None = None

    def land(batch: list[int], started: float, ended: float) -> None:
        nonlocal host, landed
        host = max(host, ended)
        dearest = max(costs[item] for item in batch)
        cost, seconds = padded_cost(costs[i] for i in batch), host - max(started, landed)
        sizer.record(Trial(size=cost, seconds=seconds, costliest_item=dearest))
        landed = host
        host += len(batch) * HOST_SAMPLE

    while queue or flight is not None:
        following = None
        if queue:
            batch = queue.take(sizer.size)
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
        if flight is not None and not sizer.overlaps:
            land(*flight)
            flight = None
    return max(host, device)


def _device_seconds(rows: int, length: int) -> float:
    prefill = rows * length * 1.5e-6 * (0.8 + length / 2000)
    step = 0.0015 + rows * (length + NEW_TOKENS) * 27e-9
    return 0.008 + prefill + (NEW_TOKENS - 1) * step


if __name__ == "__main__":
    main()
