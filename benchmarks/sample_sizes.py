"""How fast samples of 4 KiB to 1 MiB reach the device, through the pool that loading processes share and without it.

    python -m benchmarks.sample_sizes                   # on a card: 40 seconds
    python -m benchmarks.sample_sizes --device cpu

Processes make samples at once; this one takes them in batches, puts each batch together on the device and releases
it. A figure is samples a second after the first batches. Columns: as torch sends them; through the pool, every sample
copied to its place on the device; through the pool, put together in pinned memory and copied at once. The first two
decide `MIN_POOLED_ITEM_BYTES` of `memory/pinned_shared_pool.py`, the last two `MIN_COPIED_APART_BYTES` of
`memory/transfer.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from brim.memory import pinned_shared_pool, transfer
from brim.running.loader import Loader, LoaderSettings

WAYS = {  # smallest item in the pool, smallest item that is copied apart
    "as torch sends them": (1 << 60, 0),
    "pool, copied apart": (1, 0),
    "pool, put together": (1, 1 << 60),
}
WARM_UP_BATCHES = 6


class _Made:
    """Samples of one size, made in next to no time."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.arange(nbytes // 4 + 64, dtype=torch.float32)

    def __call__(self, item: int) -> torch.Tensor:
        start = item % 64
        return self._source[start : start + len(self._source) - 64].clone()


def measure(nbytes: int, way: str, arguments: argparse.Namespace) -> float:
    """Samples a second."""
    device = torch.device(arguments.device)
    pooled, apart = WAYS[way]
    pinned_shared_pool.MIN_POOLED_ITEM_BYTES = pooled
    transfer.MIN_COPIED_APART_BYTES = apart
    pool: Any = "never" if way.startswith("as torch") else "always"
    settings = LoaderSettings(
        num_workers=arguments.workers, ahead=arguments.batch, item_bytes=nbytes, pool=pool
    )  # fmt: skip
    order = range(1 << 24)
    with Loader(_Made(nbytes), order, settings, pin=device.type == "cuda") as loader:
        done, started, batches = 0, 0.0, 0
        while batches <= WARM_UP_BATCHES or time.perf_counter() - started < arguments.seconds:
            items = list(order[batches * arguments.batch : (batches + 1) * arguments.batch])
            whole = transfer.stacked(loader.take(items), device)
            loader.done(items)
            batches += 1
            if batches == WARM_UP_BATCHES:
                _wait(device)
                started = time.perf_counter()
            elif batches > WARM_UP_BATCHES:
                done += len(items)
        _wait(device)
        seconds = time.perf_counter() - started
        _check(whole, items)
    return done / seconds


def _check(whole: torch.Tensor, items: list[int]) -> None:
    first = torch.tensor([float(item % 64) for item in items])
    assert torch.equal(whole[:, 0].cpu(), first), "a sample is not what was made"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="4096,16384,65536,262144,1048576")
    parser.add_argument("--workers", type=int, default=max(min((os.cpu_count() or 2) - 2, 8), 1))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    ways = [way for way in WAYS if arguments.device != "cpu" or way != "pool, put together"]  # the same there
    print(f"{arguments.workers} loading processes, batches of {arguments.batch}, on {arguments.device}; samples/s\n")
    print("| bytes | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    rates: dict[str, dict[str, float]] = {}
    for nbytes in (int(size) for size in arguments.sizes.split(",")):
        row = rates[str(nbytes)] = {way: measure(nbytes, way, arguments) for way in ways}
        print(f"| {nbytes:,} | " + " | ".join(f"{rate:,.0f}" for rate in row.values()) + " |", flush=True)
    if arguments.json:
        document = {"arguments": vars(arguments), "rates": rates, "environment": environment()}
        Path(arguments.json).write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
