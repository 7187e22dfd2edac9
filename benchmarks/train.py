"""A small model leaves the card idle: the energy head of seed 002, from a plain DataLoader loop to stacked seeds.

    python -m benchmarks.train                         # on the card if there is one: batch 512 and 8192, ten seeds
    python -m benchmarks.train --device cpu --rows 4096 --seconds 2
    python -m benchmarks.train --device cpu --part processor --hidden 256,128
    python -m benchmarks.train --part supervised       # `brim train CONFIG --seeds 10`: the loop beside the fast path

Head 512-512-512-1 on 512 random features, AdamW, float32. A pair is one in- and one out-of-distribution row. The loops
written by hand pair rows one to one (O(n)); brim's rows are given for the same pairs and for all pairs of a batch (the
loss that the seed's system uses, n² pairs). brim's figures come from `brim train dpo` itself: the training time of its
run.json, with warm-up and the capture of graphs, without encoding and validation. The bar, on CUDA: ten seeds at batch
512 at least 35 times, at 8,192 at least 45 times the DataLoader loop at batch 512; on a CPU never slower than the
resident loop. On a machine that others use too, wall time says little about a CPU: `--part processor` compares
processor time instead, way by way in turns, the quickest of some rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import brim
from brim.molecules.heads import EnergyHead, make_heads
from brim.molecules.losses import PreferenceLoss
from brim.molecules.run import ood
from brim.settings.molecule_settings import OodCommand, OodRequest
from brim.training.fast_path.row_feed import RowFeed
from brim.training.fast_path.stacked_epochs import EpochRunner
from brim.training.fast_path.stacked_runs import StackedRuns
from brim.training.fast_path.task import Batch, RowData, RunSpec, Settings, TrainingTask

WIDTH = 512
LOSS = PreferenceLoss(pairs="matched")
TARGETS = {512: 35.0, 8192: 45.0}  # times the DataLoader loop at 512, on CUDA
STACKS, ROUNDS = (1, 4, 10), 6
Step = Callable[[torch.Tensor, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    way: str
    batch: int
    pairs_per_second: float
    notes: str = ""


def main() -> None:
    arguments = _parse()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    hidden = tuple(int(size) for size in arguments.hidden.split(","))
    sides = [torch.randn(arguments.rows, WIDTH) + shift for shift in (0.0, 0.3)]
    batches = [int(text) for text in arguments.batches.split(",")]
    if arguments.part == "processor":
        _print_processor_time(sides, batches, hidden)
        return
    if arguments.part == "supervised":
        _print_supervised(sides, batches, arguments)
        return
    plain = _data_loader(sides, 512, hidden, device, arguments.seconds)
    rows = [Row(way="DataLoader loop", batch=512, pairs_per_second=plain)]
    for batch in batches:
        rate = _resident(sides, batch, hidden, device, arguments.seconds)
        rows.append(Row(way="resident loop", batch=batch, pairs_per_second=rate))
        for path in ("resident", "stacked", "auto"):
            for pairs in ("matched", "all") if path != "resident" else ("matched",):
                rows.append(_brim(sides, batch, path, pairs, arguments))
    _print(rows, device)
    if arguments.json:
        document = {"environment": _facts(), "rows": [dataclasses.asdict(row) for row in rows]}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _training_step(hidden: tuple[int, ...], device: torch.device, loss: PreferenceLoss = LOSS) -> Step:
    head = EnergyHead(WIDTH, hidden).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)

    def step(inner: torch.Tensor, outer: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss(head(inner), head(outer)))
        optimizer.step()

    return step


def _data_loader(
    sides: list[torch.Tensor], batch: int, hidden: tuple[int, ...], device: torch.device, seconds: float
) -> float:
    """What everybody writes first."""
    loader = DataLoader(TensorDataset(*sides), batch_size=batch, shuffle=True)
    step = _training_step(hidden, device)

    def batches() -> Iterator[int]:
        while True:
            for inner, outer in loader:
                step(inner.to(device), outer.to(device))
                yield len(inner)

    return _rate(batches(), device, seconds)


def _resident(
    sides: list[torch.Tensor], batch: int, hidden: tuple[int, ...], device: torch.device, seconds: float
) -> float:
    """The rows on the device, shuffled there, one seed, eager."""
    inner, outer = (side.to(device) for side in sides)
    step = _training_step(hidden, device)

    def batches() -> Iterator[int]:
        while True:
            orders = [torch.randperm(len(inner), device=device) for _ in range(2)]
            for start in range(0, len(inner), batch):
                chosen = [order[start : start + batch] for order in orders]
                step(inner[chosen[0]], outer[chosen[1]])
                yield len(chosen[0])

    return _rate(batches(), device, seconds)


def _rate(batches: Iterator[int], device: torch.device, seconds: float) -> float:
    """Pairs per second after three steps of warm-up."""
    for _ in range(3):
        next(batches)
    _wait(device)
    started, pairs = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        pairs += next(batches)
    _wait(device)
    return pairs / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _brim(sides: list[torch.Tensor], batch: int, path: str, pairs: str, arguments: Any) -> Row:
    """`brim train dpo` on the same rows: so many of a file that 70 % of them, the training part, are as many."""
    training = _train(sides, batch, path, pairs, arguments)
    choice = training["fast_path_choice"]
    graph = ", graph" if choice["cuda_graph"] else ""
    trials = [trial for trial in choice["trials"] if trial["seconds_per_step"]]
    measured = ", ".join(f"{trial['path']} {1e3 * trial['seconds_per_step']:.2f} ms" for trial in trials)
    return Row(
        way=f"brim, {path}, {arguments.seeds} seeds, {pairs} pairs",
        batch=batch,
        pairs_per_second=training["pairs_per_second"],
        notes=f"{training['fast_path']} ×{choice['stack']}{graph}; a step of a seed: {measured}",
    )


def _train(sides: list[torch.Tensor], batch: int, path: str, pairs: str, arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        whole = round(len(sides[0]) / 0.7)
        for name, side in zip(("in", "out"), sides, strict=True):
            repeated = side.repeat(2, 1)[:whole].contiguous()
            save_file({"features": repeated}, f"{folder}/{name}.safetensors")
        request = OodRequest(
            id=f"{folder}/in.safetensors",
            ood=f"{folder}/out.safetensors",
            hidden=tuple(int(size) for size in arguments.hidden.split(",")),
            seeds=tuple(range(arguments.seeds)),
            epochs=arguments.epochs,
            validate_every=arguments.epochs,
            patience=None,
            effective_batch=batch,
            pairs=pairs,
            fast_path=path,
            device=arguments.device,
        )
        result = ood(OodCommand(request=request, output=Path(folder) / "run"))
        training: dict[str, Any] = result.summary["trainings"][0]
        return training


def _print(rows: list[Row], device: torch.device) -> None:
    print(f"{_facts()}\n")
    print("| way | batch | pairs × seeds per second | × DataLoader at 512 | × resident loop | notes |")
    print("|---|---|---|---|---|---|")
    base = rows[0].pairs_per_second
    resident = {row.batch: row.pairs_per_second for row in rows if row.way == "resident loop"}
    for row in rows:
        beside = row.pairs_per_second / resident[row.batch] if row.batch in resident else 0.0
        print(
            f"| {row.way} | {row.batch:,} | {row.pairs_per_second:,.0f} | {row.pairs_per_second / base:.1f} "
            f"| {beside:.2f} | {row.notes} |"
        )
    print()
    for row in rows:
        if row.way.startswith("brim, auto") and row.way.endswith("matched pairs"):
            if device.type == "cuda" and row.batch in TARGETS:
                ratio, target = row.pairs_per_second / base, TARGETS[row.batch]
                print(f"batch {row.batch}: {ratio:.1f} times, asked for {target:.0f}: {_verdict(ratio >= target)}")
            elif device.type == "cpu":
                ratio = row.pairs_per_second / resident[row.batch]
                print(f"batch {row.batch}: {ratio:.2f} times the resident loop: {_verdict(ratio >= 1)}")


def _print_processor_time(sides: list[torch.Tensor], batches: list[int], hidden: tuple[int, ...]) -> None:
    """How much less processor time a pair takes than in the resident loop written by hand, for the same loss."""
    print(f"{_facts()}, {torch.get_num_threads()} torch thread(s)\n")
    print(
        "| batch | pairs | resident loop, µs a pair | " + " | ".join(f"brim, {runs} at once" for runs in STACKS) + " |"
    )
    print("|---|---|---|" + "---|" * len(STACKS))
    for batch in batches:
        for pairs in ("matched", "all"):
            loss = PreferenceLoss(pairs=pairs)
            ways = [_epoch_by_hand(sides, batch, hidden, loss)]
            ways += [_epoch_of_stack(sides, batch, hidden, loss, runs) for runs in STACKS]
            best = [float("inf")] * len(ways)
            for way in ways:
                way()
            for _ in range(ROUNDS):
                for place, way in enumerate(ways):
                    started = time.process_time()
                    count = way()
                    best[place] = min(best[place], (time.process_time() - started) / count)
            ratios = " | ".join(f"{best[0] / other:.2f} ×" for other in best[1:])
            print(f"| {batch} | {pairs} | {1e6 * best[0]:.1f} | {ratios} |", flush=True)


def _epoch_by_hand(
    sides: list[torch.Tensor], batch: int, hidden: tuple[int, ...], loss: PreferenceLoss
) -> Callable[[], int]:
    step = _training_step(hidden, torch.device("cpu"), loss)

    def run() -> int:
        orders = [torch.randperm(len(side)) for side in sides]
        for start in range(0, len(sides[0]), batch):
            step(*(side[order[start : start + batch]] for side, order in zip(sides, orders, strict=True)))
        return len(sides[0])

    return run


def _epoch_of_stack(
    sides: list[torch.Tensor], batch: int, hidden: tuple[int, ...], loss: PreferenceLoss, count: int
) -> Callable[[], int]:
    def criterion(energies: torch.Tensor, rows: Batch, counts: tuple[int, ...]) -> torch.Tensor:
        del rows
        return loss(energies[: counts[0]], energies[counts[0] :])

    cpu, make = torch.device("cpu"), make_heads(WIDTH, hidden)
    specs = [RunSpec(seed=seed, lr=1e-3) for seed in range(count)]
    settings = Settings(epochs=1, batch_size=batch, matched=loss.matched)
    data = RowData(tensors={"features": torch.cat(sides)}, lengths=(len(sides[0]), len(sides[1])))
    task = TrainingTask(make_model=make, data=data, criterion=criterion)
    plan = task.plan(settings)
    runs = StackedRuns([make(spec.seed) for spec in specs], specs, task, settings, cpu)
    feed = RowFeed(data, plan, specs, stacked=runs.stacked, device=cpu, resident=True)
    runner = EpochRunner(runs, feed, plan)

    def run() -> int:
        feed.begin(feed.orders(0))
        runner.run(0)
        return count * len(sides[0])

    return run


def _print_supervised(sides: list[torch.Tensor], batches: list[int], arguments: Any) -> None:
    """Which side a row is from, learnt by several seeds of `mlp`: rows × seeds per second of each path."""
    print(f"{_facts()}\n")
    print("| path | batch | rows × seeds per second | × the loop | chosen |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        labels = torch.arange(len(sides)).repeat_interleave(len(sides[0]))
        save_file({"features": torch.cat(sides), "labels": labels}, f"{folder}/rows.safetensors")
        for batch in batches:
            base = None
            for path in ("off", "resident", "stacked", "auto"):
                nested = {
                    "model": {"type": "mlp", "params": {"hidden": [int(size) for size in arguments.hidden.split(",")]}},
                    "data": {"root": f"{folder}/rows.safetensors"},
                    "hp": {"epochs": arguments.epochs, "effective_batch": batch},
                    "training": {"device": arguments.device, "eval_every": arguments.epochs},
                }
                output = f"{folder}/{path}-{batch}"
                summary = brim.fit(nested, seeds=arguments.seeds, fast_path=path, output=output).summary
                rate, choice = summary["samples_per_second"], summary["fast_path_choice"]
                base = base or rate
                graph = ", graph" if choice["cuda_graph"] else ""
                how = f"{choice['path']} ×{choice['stack']}{graph}: {choice['reason']}"
                print(f"| {path} | {batch:,} | {rate:,.0f} | {rate / base:.2f} | {how} |")


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def _facts() -> dict[str, Any]:
    from benchmarks.environment import environment

    return environment()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual)
    parser.add_argument("--rows", type=int, default=65_536 if usual == "cuda" else 4096, help="of each side")
    parser.add_argument("--batches", default="512,8192" if usual == "cuda" else "512,4096")
    parser.add_argument("--part", default="rates", choices=("rates", "processor", "supervised"))
    parser.add_argument("--hidden", default="512,512", help="units of the hidden layers")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=40 if usual == "cuda" else 1)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each loop written by hand")
    parser.add_argument("--json", help="also write the rows here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
