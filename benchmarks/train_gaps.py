"""How much of a short epoch the device works: training, validation and a checkpoint, by `brim train` and a plain loop.

    python -m benchmarks.train_gaps                      # on a card: r3d_18, 3,000 clips of 16 × 112² an epoch
    python -m benchmarks.train_gaps --before CHECKOUT    # and by another version of brim, from its source tree
    python -m benchmarks.train_gaps --tiny               # anywhere: a small model on the CPU

Clips are decompressed and normalised in loading processes, which takes them about as long as decoding a small video.
Every way runs in a process of its own, one after the other. Device time is that of forward and backward passes,
optimizer steps and validation batches, by CUDA events around what is launched (on the CPU by the clock); wall time is
from the end of one epoch to the end of the next. The plain loop has a `DataLoader` with `persistent_workers` for
training and one for validation, keeps losses on the device, and ends every epoch with `torch.save`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
ASKED_FRACTION = 0.92
SOURCE = '''
"""Clips that cost about as much as decoding them, and a small model for the CPU."""
import random
import zlib

import torch
from torch import nn

MEAN, STD = (0.432, 0.395, 0.376), (0.228, 0.221, 0.217)


class Clips:
    def __init__(self, count, frames, size, kinds=32):
        draw = random.Random(0)
        shape = (frames, size, size, 3)
        coarse = [bytes(draw.randrange(256) for _ in range(256)) for _ in range(kinds)]
        nbytes = frames * size * size * 3
        self.held = [zlib.compress((one * (nbytes // 256 + 1))[:nbytes], 1) for one in coarse]
        self.count, self.shape = count, shape

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        raw = bytearray(zlib.decompress(self.held[item % len(self.held)]))
        clip = torch.frombuffer(raw, dtype=torch.uint8).reshape(self.shape).permute(3, 0, 1, 2).float().div_(255)
        mean, std = (torch.tensor(values).reshape(3, 1, 1, 1) for values in (MEAN, STD))
        return clip.sub_(mean).div_(std).contiguous(), item % 4


def clips(count: int = 3000, held_out: int = 600, frames: int = 16, size: int = 112):
    return lambda split: Clips(count if split == "train" else held_out, frames, size)


def small(num_classes: int = 4):
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(4), nn.Flatten(),
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, num_classes),
    )
'''


class Recorder:
    """Device time of what is launched, by kind, and when each epoch ended."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.epochs: list[dict[str, Any]] = []
        self._pieces: list[tuple[str, Any, Any]] = []
        self.marks: dict[str, float] = {}

    @contextlib.contextmanager
    def piece(self, kind: str) -> Iterator[None]:
        """What is launched inside is the device's work of this kind."""
        start = self._now()
        try:
            yield
        finally:
            self._pieces.append((kind, start, self._now()))

    def mark(self, name: str) -> None:
        """Seconds since the process began, the first time."""
        self.marks.setdefault(name, time.perf_counter() - STARTED)

    def epoch_ended(self) -> None:
        """Everything launched so far belongs to the epochs that have ended."""
        self.epochs.append({"ended": time.perf_counter(), "pieces": self._pieces})
        self._pieces = []

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def rows(self) -> list[dict[str, float]]:
        """Each epoch from the second on."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize()
        rows = []
        for before, epoch in zip(self.epochs, self.epochs[1:], strict=False):
            seconds = {"train": 0.0, "validation": 0.0}
            for kind, start, end in epoch["pieces"]:
                seconds[kind] += start.elapsed_time(end) / 1000 if self.on_cuda else end - start
            wall = epoch["ended"] - before["ended"]
            rows.append({"wall": wall, **seconds, "fraction": sum(seconds.values()) / wall})
        return rows


def recorded(recorder: Recorder, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its work recorded."""

    def wrapped(*values: Any, **options: Any) -> Any:
        with recorder.piece(kind):
            result = function(*values, **options)
        recorder.mark(f"first {kind} launched")
        return result

    return wrapped


def settings_of(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same training for every version of brim."""
    knobs = {} if arguments.tiny else {"frames": arguments.frames, "size": arguments.size}
    return {
        "task": "classify",
        "model": {"type": f"py:{folder / 'gaps.py'}:small" if arguments.tiny else "r3d_18", "num_classes": 4},
        "data": {
            "type": f"py:{folder / 'gaps.py'}:clips",
            "num_workers": arguments.workers,
            "params": {
                "count": arguments.clips, "held_out": arguments.held_out, "frames": arguments.frames,
                "size": arguments.size,
            },
        },
        "hp": {
            "effective_batch": arguments.batch, "epochs": arguments.epochs, "learning_rate": 1e-3, **knobs
        },
        "optimizer": {"name": "adamw"},
        "training": {"device": arguments.device, "dtype": "float32" if arguments.tiny else "bfloat16"},
    }  # fmt: skip


def run_brim(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """`brim train`, of whichever version is on the path."""
    from brim.settings.train_request import TrainRequest
    from brim.settings.train_settings import train_settings
    from brim.training.listener import TrainListener
    from brim.training.micro_batches import GradientPass
    from brim.training.optimizers import OptimizerStep
    from brim.training.run import run_training
    from brim.training.validation import Validation

    recorder = Recorder(arguments.device == "cuda")
    recorder.mark("imported")
    changed: Any = (GradientPass, OptimizerStep, Validation)
    for kind, owner, name in (
        ("train", changed[0], "backward"), ("train", changed[1], "make"), ("validation", changed[2], "_judge")
    ):  # fmt: skip
        setattr(owner, name, recorded(recorder, kind, getattr(owner, name)))

    class Ends(TrainListener):
        def opened(self, facts: Any) -> None:
            del facts
            recorder.mark("model and data there")

        def step(self, record: Any) -> None:
            del record
            recorder.mark("first step done")

        def epoch(self, row: dict[str, Any]) -> None:
            del row
            recorder.mark("first epoch done")
            recorder.epoch_ended()

    request = TrainRequest(settings=train_settings(settings_of(folder, arguments)), use_cache=False)
    result = run_training(request, output=folder / "run", listener=Ends())
    names = (
        "gpu_wait_fraction", "gpu_wait_causes", "samples_per_second", "checkpoint_seconds", "eval_seconds", "loader",
        "micro_batch_size", "eval_batch_size",
    )  # fmt: skip
    return {
        "epochs": recorder.rows(),
        "marks": recorder.marks,
        "summary": {name: result.summary.get(name) for name in names},
    }


def run_plain(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The loop that people write."""
    import torch
    from torch.utils.data import DataLoader

    sys.path.insert(0, str(folder))
    import gaps  # type: ignore[import-not-found]  # written by this program

    recorder = Recorder(arguments.device == "cuda")
    recorder.mark("imported")
    pinned = arguments.device == "cuda"
    split = gaps.clips(arguments.clips, arguments.held_out, arguments.frames, arguments.size)
    workers = arguments.workers or max(min((os.cpu_count() or 2) - 2, 16), 1)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "pin_memory": pinned}
    training = DataLoader(split("train"), batch_size=arguments.batch, shuffle=True, **options)
    held_out = DataLoader(split("validation"), batch_size=arguments.batch, **options)
    model = gaps.small() if arguments.tiny else _video_model()
    model.to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def outputs(clips: Any) -> Any:
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=not arguments.tiny):
            return model(clips.to(arguments.device, non_blocking=True)).float()

    for _ in range(arguments.epochs):
        model.train()
        losses = []
        for clips, labels in training:
            with recorder.piece("train"):
                optimizer.zero_grad()
                wanted = labels.to(arguments.device, non_blocking=True)
                loss = torch.nn.functional.cross_entropy(outputs(clips), wanted)
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
            recorder.mark("first train launched")
        torch.stack(losses).mean().item()
        model.eval()
        right = []
        with torch.inference_mode():
            for clips, labels in held_out:
                with recorder.piece("validation"):
                    right.append((outputs(clips).argmax(dim=1).cpu() == labels).sum())
        torch.stack(right).sum().item()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        recorder.mark("first epoch done")
        recorder.epoch_ended()
    return {"epochs": recorder.rows(), "marks": recorder.marks, "summary": {"loader": {"num_workers": workers}}}


def _video_model() -> Any:
    import torchvision

    return torchvision.models.video.r3d_18(num_classes=4)


def start(way: str, source: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One way in a process of its own, with the brim of a source tree."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        (folder / "gaps.py").write_text(SOURCE, encoding="utf-8")
        command = [sys.executable, str(Path(__file__).resolve()), "--child", way, "--work", name, *sys.argv[1:]]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Epochs from the second on, and the first seconds."""
    columns = (
        "way", "epochs", "wall, s", "train, s", "validation, s", "device / wall", "lowest", "clips/s",
        "first step done, s", "first epoch done, s",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, one in found.items():
        rows = one["epochs"]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("wall", "train", "validation")}
        fraction = (mean["train"] + mean["validation"]) / mean["wall"]
        marks = one["marks"]
        first = marks.get("first step done", marks.get("first train launched"))
        lines.append(
            f"| {name} | {len(rows)} | {mean['wall']:.2f} | {mean['train']:.2f} | {mean['validation']:.2f} | "
            f"**{fraction:.3f}** | {min(row['fraction'] for row in rows):.3f} | {one['clips'] / mean['wall']:.0f} | "
            f"{first:.1f} | {marks['first epoch done']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = _parse()
    if arguments.child:
        folder = Path(arguments.work)
        run = run_plain if arguments.child == "plain" else run_brim
        (folder / "found.json").write_text(json.dumps(run(folder, arguments)), encoding="utf-8")
        return
    here = Path(__file__).resolve().parents[1] / "src"
    ways = {"brim train": ("brim", here), "plain loop": ("plain", here)}
    if arguments.before:
        ways["brim train before"] = ("brim", Path(arguments.before).resolve() / "src")
    found: dict[str, dict[str, Any]] = {}
    for name, (way, source) in ways.items():
        found[name] = {**start(way, source, arguments), "clips": arguments.clips}
        print(f"{name}: {json.dumps({key: found[name][key] for key in ('marks', 'summary')})}", flush=True)
    print(table(found))
    rows = found["brim train"]["epochs"]
    fraction = sum(row["train"] + row["validation"] for row in rows) / sum(row["wall"] for row in rows)
    print(f"\ndevice / wall from the second epoch on: {fraction:.3f} (asked for: {ASKED_FRACTION})")
    if arguments.json:
        from benchmarks.environment import environment

        document = {"arguments": vars(arguments), "found": found, "fraction": fraction, "environment": environment()}
        Path(arguments.json).write_text(json.dumps(document, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=None, metavar="CHECKOUT", help="a source tree of brim to compare with")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--device", default=None)
    parser.add_argument("--clips", type=int, default=None)
    parser.add_argument("--held-out", type=int, default=None)
    parser.add_argument("--frames", type=int, default=None)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--folder", default=None, help="where runs are written: the disk that checkpoints go to")
    parser.add_argument("--json", default=None)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    small = {"device": "cpu", "clips": 240, "held_out": 60, "frames": 4, "size": 32, "batch": 24}
    full = {"device": "cuda", "clips": 3000, "held_out": 600, "frames": 16, "size": 112, "batch": 96}
    for name, value in (small if arguments.tiny else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


if __name__ == "__main__":
    main()
