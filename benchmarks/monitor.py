"""What the monitor costs the run it watches: the same work with and without it, in turns.

    python -m benchmarks.monitor                    # the host part
    python -m benchmarks.monitor --index 0          # with the first card too
    python -m benchmarks.monitor --intervals 0.5,0.02 --pairs 96

Two loads: plain Python, which holds the interpreter lock that the sampler's thread needs too, and torch matrix products
on the CPU, which release it. A pair is one block of work without and one with the sampler, in alternating order, so
that a drift of the machine falls on both; the ratio is the median over pairs, with its 95 % interval. Wall time is what
a run feels, but other programs on the machine disturb it; processor time counts this process alone. An interval far
below the default makes the cost exceed the noise: divide it to get the default's. The first table
is taken while the process sleeps, so its processor time is the sampler's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from brim.monitor.sampler import Sampler

Work = Callable[[], None]
Watch = Callable[[], contextlib.AbstractContextManager[object]]
MakeSampler = Callable[[float], Sampler]
START_SECONDS = 0.2  # the thread has started, and NVML with it


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "psutil", "nvidia-ml-py"))
    print(
        f"{os.cpu_count()} cores, {arguments.threads} torch thread(s), Python {platform.python_version()}, {packages}\n"
    )
    intervals = [float(text) for text in arguments.intervals.split(",")]
    with tempfile.TemporaryDirectory() as folder:

        def sampler(interval_seconds: float) -> Sampler:
            return Sampler(Path(folder) / "monitor.csv", index=arguments.index, interval_seconds=interval_seconds)

        _print_processor_time(sampler, intervals, arguments.sleep_seconds)
        _print_ratios(sampler, intervals, arguments.pairs, arguments.block_seconds)


def _print_processor_time(sampler: MakeSampler, intervals: list[float], sleep_seconds: float) -> None:
    print("| interval s | samples | start and stop ms | processor ms per sample | of one core |")
    print("|---|---|---|---|---|")
    for interval in intervals:
        started = time.perf_counter()
        with sampler(interval):
            pass
        ends_seconds = time.perf_counter() - started
        with sampler(interval) as watching:
            time.sleep(START_SECONDS)
            samples_before, used_before = watching.summary().samples, time.process_time()
            time.sleep(sleep_seconds)
            used = time.process_time() - used_before
            samples = watching.summary().samples - samples_before
        per_sample = 1e3 * used / samples
        print(
            f"| {interval:g} | {samples} | {1e3 * ends_seconds:.1f} | {per_sample:.2f} | {used / sleep_seconds:.3%} |"
        )
    print()


def _print_ratios(sampler: MakeSampler, intervals: list[float], pairs: int, block_seconds: float) -> None:
    """A row for each load and interval, and one in which no block is watched: the noise of the machine."""
    print("| load | interval s | pairs | processor time, with / without | wall time, with / without |")
    print("|---|---|---|---|---|")
    for name, load in {"plain Python": _plain_python, "torch matmul": _matmul()}.items():
        repeats = _repeats(load, block_seconds)
        watches: dict[str, Watch] = {f"{interval:g}": partial(sampler, interval) for interval in intervals}
        for interval, watch in {**watches, "never": contextlib.nullcontext}.items():
            ratios = _ratios(load, repeats, pairs, watch)
            processor = _median_and_interval([ratio.processor for ratio in ratios])
            wall = _median_and_interval([ratio.wall for ratio in ratios])
            print(f"| {name} | {interval} | {pairs} | {processor} | {wall} |", flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    processor: float  # of all threads of this process
    wall: float


def _ratios(load: Work, repeats: int, pairs: int, watch: Watch) -> list[Seconds]:
    """With over without, pair by pair; starting and stopping the sampler is not timed."""
    ratios = []
    for pair in range(pairs):
        seconds: dict[bool, Seconds] = {}
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            with watch() if watched else contextlib.nullcontext():
                time.sleep(START_SECONDS)
                seconds[watched] = _time(load, repeats)
        with_it, without = seconds[True], seconds[False]
        ratios.append(Seconds(processor=with_it.processor / without.processor, wall=with_it.wall / without.wall))
    return ratios


def _time(load: Work, repeats: int) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        load()
    return Seconds(processor=time.process_time() - processor, wall=time.perf_counter() - wall)


def _median_and_interval(values: list[float]) -> str:
    """The median, and the 95 % interval of it that the ranks give whatever the distribution."""
    ordered, reach = sorted(values), round(0.98 * math.sqrt(len(values)))
    low, high = ordered[max(0, len(values) // 2 - reach)], ordered[min(len(values) - 1, len(values) // 2 + reach)]
    return f"{statistics.median(values):.4f} ({low:.4f} to {high:.4f})"


def _repeats(load: Work, block_seconds: float) -> int:
    load()
    trials = 20
    return max(1, round(block_seconds / (_time(load, trials).wall / trials)))


def _plain_python() -> None:
    total = 0
    for number in range(50_000):
        total += number * number


def _matmul(size: int = 384) -> Work:
    left, right = torch.rand(size, size), torch.rand(size, size)

    def multiply() -> None:
        torch.mm(left, right)

    return multiply


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=int, help="the driver's card to sample too; by default only the host")
    parser.add_argument("--intervals", default="0.5,0.02", help="seconds between samples, by commas")
    parser.add_argument("--pairs", type=int, default=60, help="blocks with and without, each")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="length of a block")
    parser.add_argument("--sleep-seconds", type=float, default=20.0, help="how long to watch a sleeping process")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
