"""What the monitor costs the run it watches: the same work with and without it, in turns.

    python -m benchmarks.monitor                    # the host part
    python -m benchmarks.monitor --index 0          # with the first card too
    python -m benchmarks.monitor --intervals 0.5,0.02 --pairs 96
    python -m benchmarks.monitor --part published              # sampler and live.json together, beside training steps
    python -m benchmarks.monitor --part published --index 0    # the same on a card
    python -m benchmarks.monitor --part smi --index 0          # brim's readings against nvidia-smi, in the same second

Two loads: plain Python, which holds the interpreter lock that the sampler's thread needs too, and torch matrix products
on the CPU, which release it. A pair is one block of work without and one with the sampler, in alternating order, so
that a drift of the machine falls on both; the ratio is the median over pairs, with its 95 % interval. Wall time is what
a run feels, but other programs on the machine disturb it; processor time counts this process alone. An interval far
below the default makes the cost exceed the noise: divide it to get the default's. The first table
is taken while the process sleeps, so its processor time is the sampler's alone.

`--part published` is a run as brim makes it: training steps, each followed by an update of what is published, with the
sampler and the publishing thread at their default intervals. Blocks with and without them alternate in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from brim.monitor.live import LiveRun, both
from brim.monitor.nvml import CardRow, OpenCards
from brim.monitor.sampler import Sampler
from brim.training.listener import StepRecord, TrainListener
from brim.training.live_figures import LiveTraining

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
    if arguments.part == "smi":
        _compare_with_smi(arguments.pairs, arguments.index or 0)
        return
    if arguments.part == "published":
        _print_published(arguments)
        return
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


# ------------------------------------------------------------------------------------------------ published


def _print_published(arguments: argparse.Namespace) -> None:
    """What sampling and publishing cost a run: the threads' processor time, an update, and blocks with and without."""
    device = torch.device("cpu" if arguments.index is None else f"cuda:{arguments.index}")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")

        @contextlib.contextmanager
        def published() -> Iterator[TrainListener]:
            sampler = Sampler(folder / "monitor.csv", index=arguments.index)
            with sampler, LiveRun(folder, "train") as live:
                listener = both(TrainListener, LiveTraining(live), TrainListener())
                listener.ready(lambda: {"batch_size_found": "given", "wait_seconds": 0.0, "peak_reserved_bytes": 1})
                listener.started(10**9, 0)
                yield listener

        with published() as listener:
            time.sleep(START_SECONDS)
            before = time.process_time()
            time.sleep(arguments.sleep_seconds)
            of_a_core = (time.process_time() - before) / arguments.sleep_seconds
            updates = 20_000
            started = time.perf_counter()
            for _ in range(updates):
                listener.step(_RECORD)
            update_seconds = (time.perf_counter() - started) / updates
        step = _training_step(device)
        repeats = _repeats(step, arguments.block_seconds)
        step_seconds = _time(step, repeats).wall / repeats
        print("| figure | value |\n|---|---|")
        print(f"| processor time of both threads, of one core | {of_a_core:.3%} |")
        print(f"| one update | {1e6 * update_seconds:.2f} µs |")
        print(f"| one step | {1e3 * step_seconds:.3f} ms |")
        print(f"| updates, of the steps | {update_seconds / step_seconds:.4%} |\n", flush=True)
        print("| steps on | pairs | processor time, with / without | wall time, with / without |")
        print("|---|---|---|---|")
        watches: dict[str, Watch] = {"": published, " (neither published)": contextlib.nullcontext}
        for name, watch in watches.items():
            ratios = _published_ratios(step, repeats, arguments.pairs, watch)
            processor = _median_and_interval([ratio.processor for ratio in ratios])
            wall = _median_and_interval([ratio.wall for ratio in ratios])
            print(f"| {device}{name} | {arguments.pairs} | {processor} | {wall} |", flush=True)


def _published_ratios(step: Work, repeats: int, pairs: int, watch: Watch) -> list[Seconds]:
    """As `_ratios`, with an update after each step of a block that is published."""
    ratios = []
    for pair in range(pairs):
        seconds: dict[bool, Seconds] = {}
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            with watch() if watched else contextlib.nullcontext() as listener:
                time.sleep(START_SECONDS)

                def work(listener: object = listener) -> None:
                    step()
                    if isinstance(listener, TrainListener):
                        listener.step(_RECORD)

                seconds[watched] = _time(work, repeats)
        with_it, without = seconds[True], seconds[False]
        ratios.append(Seconds(processor=with_it.processor / without.processor, wall=with_it.wall / without.wall))
    return ratios


_RECORD = StepRecord(
    step=1, epoch=0, samples=64, loss=0.5, learning_rate=0.1, effective_batch=64, micro_batches=(64,), seconds=0.01
)


def _training_step(device: torch.device) -> Work:
    """A step of a small network; on a card its end is waited for, as where a loss is read."""
    wide = 512 if device.type == "cpu" else 4096
    model = torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, labels = torch.rand(64, wide, device=device), torch.randint(10, (64,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


# ------------------------------------------------------------------------------------------------ nvidia-smi

_SMI: dict[str, tuple[Callable[[CardRow], Any], str]] = {  # a field of nvidia-smi, brim's figure of it, the unit
    "memory.total": (lambda row: (row.memory_total_bytes or 0) / 2**20, "MiB"),
    "memory.used": (lambda row: (row.figures.memory_used_bytes or 0) / 2**20, "MiB"),
    "utilization.gpu": (lambda row: 100 * (row.figures.utilisation or 0.0), "%"),
    "power.draw.instant": (lambda row: row.figures.power_watts, "W"),
    "power.draw": (lambda row: row.figures.power_watts, "W"),
    "enforced.power.limit": (lambda row: row.power_limit_watts, "W"),
    "temperature.gpu": (lambda row: row.figures.temperature_c, "°C"),
    "clocks.sm": (lambda row: row.figures.sm_clock_mhz, "MHz"),
    "clocks.mem": (lambda row: row.figures.memory_clock_mhz, "MHz"),
}


def _compare_with_smi(readings: int, index: int) -> None:
    """Both asked in the same second, again and again, while the card works in bursts."""
    stop = threading.Event()
    load = threading.Thread(target=_bursts, args=(stop, index), daemon=True)
    load.start()
    cards = OpenCards()
    found: dict[str, list[tuple[float, float]]] = {field: [] for field in _SMI}
    for _ in range(readings):
        time.sleep(0.5)
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits", f"--id={index}"],
            capture_output=True, text=True, check=True,
        ).stdout.split(",")  # fmt: skip
        row = next(row for row in cards.read() if row.index == index and row.slice_of is None)
        for (field, (ours, _)), theirs in zip(_SMI.items(), answer, strict=True):
            with contextlib.suppress(ValueError, TypeError):  # "[N/A]", or not known here
                found[field].append((float(theirs), float(ours(row))))
    stop.set()
    load.join()
    cards.close()
    print("| field | unit | readings | nvidia-smi, median | brim, median | largest difference |")
    print("|---|---|---|---|---|---|")
    for field, pairs in found.items():
        if pairs:
            medians = [statistics.median(pair[side] for pair in pairs) for side in (0, 1)]
            apart = max(abs(one - other) for one, other in pairs)
            print(f"| {field} | {_SMI[field][1]} | {len(pairs)} | {medians[0]:.1f} | {medians[1]:.1f} | {apart:.1f} |")


def _bursts(stop: threading.Event, index: int) -> None:
    left = torch.rand(8192, 8192, device=f"cuda:{index}")
    while not stop.is_set():
        until = time.monotonic() + 3
        while time.monotonic() < until and not stop.is_set():
            torch.mm(left, left).sum().item()
        stop.wait(2)


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
    parser.add_argument("--part", choices=("sampler", "published", "smi"), default="sampler", help="what is measured")
    parser.add_argument("--index", type=int, help="the driver's card to sample too; by default only the host")
    parser.add_argument("--intervals", default="0.5,0.02", help="seconds between samples, by commas")
    parser.add_argument("--pairs", type=int, default=60, help="blocks with and without, each")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="length of a block")
    parser.add_argument("--sleep-seconds", type=float, default=20.0, help="how long to watch a sleeping process")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
