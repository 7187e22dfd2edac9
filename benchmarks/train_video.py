"""Two questions about `brim train`: how good is the micro-batch that a run finds, and what do brim's ranks cost?

    python -m benchmarks.train_video --memory-limit 24GiB                      # three video models on CUDA
    torchrun --nproc-per-node=2 -m benchmarks.train_video --ranks              # against DistributedDataParallel
    torchrun --nproc-per-node=2 -m benchmarks.train_video --ranks --device cpu

The first trains each model with `-b auto`, then at every fixed micro-batch of a ladder from a part of the one found
(`--shorter`), on clips that lie on the device already, and holds the rate at the size found against the best rate of
the ladder. Every rate is the median over the second half of a run's steps. The second trains one model in two ways with
the same windows: brim's (votes, flat sums) and DistributedDataParallel's (`no_sync` but for the last micro-batch).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.errors import DoesNotFitError
from brim.memory.devices import memory_of
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import train_settings
from brim.training.run import run_training
from brim.training.run_files import read_steps

MODELS = {"r3d_18": 112, "swin3d_t": 224, "mvit_v2_s": 224}
CLASSES = 8
CLIPS = 64  # distinct ones on the device

# A factory of training data: every sample is one of a few clips that lie on the device already.
DATA = """
import torch

def clips(count: int = 4096, distinct: int = 64, frames: int = 16, size: int = 112, classes: int = 8,
          where: str = "cpu"):
    generator = torch.Generator(device=where).manual_seed(0)
    held = [torch.randn(3, frames, size, size, device=where, generator=generator) for _ in range(distinct)]

    class Repeated:
        def __len__(self):
            return count

        def __getitem__(self, item):
            return held[item % distinct], item % classes

    return lambda split: Repeated() if split == "train" else None
"""


def main() -> None:
    arguments = _parse()
    if arguments.ranks:
        _compare_ranks(arguments)
        return
    from benchmarks.environment import environment

    chosen = {model: arguments.size or size for model, size in MODELS.items() if model in arguments.models}
    rows = []
    for model, size in chosen.items():
        rows.append(_judge_plan(model, size, arguments))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    print(json.dumps(environment()))
    print("| model | found | rate /s | best of the ladder | at | of best | OOM | retries | in steady steps | at it |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['found']} | {row['rate']:.1f} | {row['best_rate']:.1f} | {row['best']} | "
            f"{row['of_best']:.3f} | {row['oom_events']} | {row['alloc_retries']} | "
            f"{row['retries_of_the_run']} | {row['retries_at_it']} |"
        )


def _judge_plan(model: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The micro-batch that a run finds, beside every one of a ladder."""
    found = _train(model, size, arguments, batch_size="auto", steps=arguments.steps)
    micro = found["summary"]["micro_batch_size"]
    ladder = sorted(
        {micro, *(length for length in _ladder(arguments.effective_batch) if arguments.shorter * length >= micro)}
    )
    rates: dict[int, float] = {}
    retries = None
    for length in ladder:
        try:
            trial = _train(model, size, arguments, batch_size=length, steps=arguments.ladder_steps, fixed=True)
        except DoesNotFitError:
            break
        rates[length] = trial["rate"]
        if length == micro:
            retries = trial["steady_retries"]
        print(f"{model} at {length}: {trial['rate']:.1f}/s", file=sys.stderr, flush=True)
    best = max(rates, key=rates.__getitem__)
    return {
        "model": model,
        "found": micro,
        "rate": rates.get(micro, found["rate"]),
        "rate_of_the_run": found["rate"],
        "best": best,
        "best_rate": rates[best],
        "of_best": rates.get(micro, found["rate"]) / rates[best],
        "oom_events": found["summary"]["oom_events"],
        "alloc_retries": found["summary"]["alloc_retries"],
        "retries_at_it": retries,
        "retries_of_the_run": found["steady_retries"],
        "steps": found["steps"],  # micro-batch and retries of each
        "ladder": rates,
    }


def _ladder(effective: int) -> list[int]:
    """Lengths that divide the effective batch, so that every part of a window is as long."""
    return [length for length in range(2, effective + 1) if effective % length == 0]


def _train(
    model: str, size: int, arguments: argparse.Namespace, *, batch_size: Any, steps: int, fixed: bool = False
) -> dict[str, Any]:
    device = arguments.device
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "clips.py").write_text(DATA, encoding="utf-8")
        settings = train_settings(
            {
                "model": {"type": model, "num_classes": CLASSES},
                "data": {
                    "type": f"py:{folder}/clips.py:clips",
                    "num_workers": 0,
                    "params": {
                        "frames": arguments.frames,
                        "size": size,
                        "classes": CLASSES,
                        "distinct": CLIPS,
                        "where": device,
                    },
                },
                "hp": {
                    "batch_size": batch_size,
                    "effective_batch": arguments.effective_batch,
                    "max_steps": steps,
                    "epochs": 1000,
                    "frames": arguments.frames,
                    "size": size,
                },
                "training": {"device": device, "dtype": arguments.dtype, "memory_limit": arguments.memory_limit},
            }
        )
        request = TrainRequest(settings=settings, use_cache=False, fixed=fixed, fail_on_oom=fixed)
        try:
            result = run_training(request, output=Path(folder) / "run")
        finally:
            memory_of(device).release()
        lines = read_steps(result.folder / "steps.jsonl")
        steady = lines[len(lines) // 2 :]
        rate = statistics.median(line["effective_batch"] / line["seconds"] for line in steady)
        return {
            "summary": result.summary,
            "rate": rate,
            "steady_retries": sum(line["alloc_retries"] for line in steady),
            "steps": [(max(line["micro_batches"]), line["alloc_retries"]) for line in lines],
        }


class _Head(nn.Module):
    """A model whose weights are many against its arithmetic: what ranks cost shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)], nn.Linear(width, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(rows)
        return scores


def _compare_ranks(arguments: argparse.Namespace) -> None:
    """The same windows through brim's ranks and through DistributedDataParallel."""
    from brim.ranks.agreement import Agreement, Vote
    from brim.ranks.gradients import RankGroup
    from brim.sizing.micro_batches import MicroBatchRequest, MicroBatchSizer
    from brim.training.micro_batches import GradientPass, MicroBatches, PeakMeter, WindowWork
    from brim.training.objective import Batch, Classification
    from brim.training.optimizers import OptimizerStep

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if arguments.device == "cuda" else torch.device("cpu")
    group = RankGroup(device)
    share, micro = arguments.share, arguments.micro
    rows, labels = (
        torch.randn(share, arguments.width, device=device),
        torch.zeros(share, dtype=torch.int64, device=device),
    )
    samples = share * group.world.size

    torch.manual_seed(0)
    model = _Head(arguments.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    trainable = list(model.parameters())
    group.prepare(trainable)
    sizes = MicroBatchSizer(MicroBatchRequest(ceiling=micro))
    gradients = GradientPass(model=model, objective=Classification(2), device=device)
    runner = MicroBatches(gradients, sizes, PeakMeter(memory_of(device), enabled=False))
    stepper = OptimizerStep(runner, optimizer, group, guarded=False)
    work = WindowWork(
        items=range(share), costs=[1] * share, samples=samples,
        fetch=lambda part: Batch(rows[part[0] : part[-1] + 1], labels[part[0] : part[-1] + 1]),
    )  # fmt: skip

    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(_Head(arguments.width).to(device))
    plain_optimizer = torch.optim.AdamW(wrapped.parameters())

    def ddp_step() -> None:
        plain_optimizer.zero_grad(set_to_none=True)
        parts = [slice(start, start + micro) for start in range(0, share, micro)]
        for part in parts[:-1]:
            with wrapped.no_sync():
                (nn.functional.cross_entropy(wrapped(rows[part]), labels[part], reduction="sum") / share).backward()
        last = parts[-1]
        (nn.functional.cross_entropy(wrapped(rows[last]), labels[last], reduction="sum") / share).backward()
        plain_optimizer.step()

    with Agreement(timeout_seconds=600) as agreement:

        def brim_step() -> None:
            done = runner.run(work)
            agreement.gather(Vote(value={"absent": stepper.absent()}))
            stepper.make(done, samples)

        ways = {"ddp": ddp_step, "brim": brim_step}
        for step in ways.values():
            for _ in range(3):
                step()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.steps):  # in turn: a slow moment hits both
            for name, step in ways.items():
                agreement.gather(Vote())
                _wait(device)
                started = time.perf_counter()
                step()
                _wait(device)
                taken[name].append(time.perf_counter() - started)
    if group.world.rank == 0:
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        facts = {
            "ranks": group.world.size, "device": device.type, "width": arguments.width, "share": share, "micro": micro,
            "weights": sum(parameter.numel() for parameter in trainable), "seconds": medians,
            "brim_over_ddp": medians["brim"] / medians["ddp"],
        }  # fmt: skip
        print(json.dumps(facts, indent=1))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--size", type=int, default=None, help="instead of each model's own, for a quick try")
    parser.add_argument("--memory-limit", default=None)
    parser.add_argument("--effective-batch", type=int, default=192)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ladder-steps", type=int, default=8, help="of each micro-batch of the ladder")
    parser.add_argument("--shorter", type=float, default=4, help="the ladder begins so many times below what is found")
    parser.add_argument("--ranks", action="store_true", help="compare with DistributedDataParallel, under torchrun")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--share", type=int, default=256, help="samples of a window on each rank")
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--json", help="also write the rows to this file; not with --ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
