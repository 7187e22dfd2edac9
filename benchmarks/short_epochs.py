"""What an epoch of a few hundred pictures costs: loading processes that stay, and those that are started every time.

    python -m benchmarks.short_epochs                              # 400 pictures, resnet18 at 64²
    python -m benchmarks.short_epochs --stand-in 8 --pictures 100  # no card: a step takes 8 ms a picture, no core

Loops train the same model on the same JPEG files at the same batch: torch's `DataLoader` without processes, with some,
and with `persistent_workers`, and `brim train`. Rounds alternate between them, each a run of its own; a figure is the
median of its epochs after the first, by the clock on the wall from the end of one epoch to the end of the next, best of
the rounds. brim's epochs end with a checkpoint, the others' do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.environment import environment
from brim.models import python_factory
from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import train_settings
from brim.training.listener import TrainListener
from brim.training.run import run_training

CLASSES = 4
STAND_IN = """
import time
from torch import nn
from benchmarks.short_epochs import picture_transform


class StandIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, {classes})
        self.transform = picture_transform()

    def forward(self, pictures):
        time.sleep({seconds} * len(pictures))
        return self.head(pictures.mean(dim=(2, 3)))


def stand_in(size: int = 64):
    return StandIn()
"""


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        _write_pictures(Path(folder) / "pictures", arguments.pictures)
        loops: dict[str, Callable[[], list[float]]] = {
            "DataLoader, no processes": lambda: _plain(Path(folder), arguments, workers=0),
            "DataLoader": lambda: _plain(Path(folder), arguments, workers=arguments.workers),
            "DataLoader, persistent_workers": lambda: _plain(
                Path(folder), arguments, workers=arguments.workers, persistent=True
            ),
            "brim train": lambda: _brim(Path(folder), arguments),
        }
        found: dict[str, list[float]] = {name: [] for name in loops}
        if arguments.stand_in is not None:
            _write_stand_in(Path(folder), arguments.stand_in)
        if arguments.workers is None:
            _brim(Path(folder), arguments)  # to learn what it chooses
        for turn in range(arguments.rounds):
            for name, loop in loops.items():
                ends = loop()
                found[name].append(statistics.median(b - a for a, b in itertools.pairwise(ends)))
                print(f"round {turn + 1}: {name}: {found[name][-1]:.3f} s an epoch", flush=True)
    plain = min(found["DataLoader"])
    print(f"{arguments.workers} loading processes")
    print("| loop | seconds an epoch | samples/s | times DataLoader |\n|---|---|---|---|")
    for name, seconds in found.items():
        best = min(seconds)
        print(f"| {name} | {best:.2f} | {arguments.pictures / best:.0f} | {plain / best:.2f} |")
    document = {"arguments": vars(arguments), "seconds": found, "environment": environment()}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=None, help="of the plain loops; else what brim chooses")
    parser.add_argument("--stand-in", type=float, default=None, metavar="MS", help="a model that only takes time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default=None)
    return parser.parse_args()


def _write_pictures(folder: Path, count: int) -> None:
    """JPEG files of 640 × 480, a folder for each class."""
    draw = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((640, 480)).save(place / f"{number}.jpg", quality=90)


def picture_transform() -> Any:
    """A picture as a small model reads it."""
    from torchvision.transforms import v2 as transforms

    return transforms.Compose([
        transforms.Resize(64), transforms.CenterCrop(64), transforms.ToImage(),
        transforms.ToDtype(torch.float32, scale=True),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ])  # fmt: skip


def _settings(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {"type": _model_name(folder, arguments), "num_classes": CLASSES},
        "data": {"type": "image_folder", "root": str(folder / "pictures"), "val_split": "none"},
        "hp": {
            "epochs": arguments.epochs, "size": 64, "batch_size": arguments.batch,
            "effective_batch": arguments.batch, "learning_rate": 1e-3,
        },
        "optimizer": {"name": "adamw"},
        "training": {"device": arguments.device, "dtype": "float32"},
    }  # fmt: skip


def _write_stand_in(folder: Path, milliseconds: float) -> None:
    (folder / "stand_in.py").write_text(STAND_IN.format(seconds=milliseconds / 1000, classes=CLASSES))


def _model_name(folder: Path, arguments: argparse.Namespace) -> str:
    return "resnet18" if arguments.stand_in is None else f"py:{folder / 'stand_in.py'}:stand_in"


class _Ends(TrainListener):
    """When each epoch ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def epoch(self, row: dict[str, Any]) -> None:
        del row
        self.at.append(time.perf_counter())


def _brim(folder: Path, arguments: argparse.Namespace) -> list[float]:
    listener = _Ends()
    request = TrainRequest(settings=train_settings(_settings(folder, arguments)), use_cache=False)
    with tempfile.TemporaryDirectory() as run:
        result = run_training(request, output=Path(run) / "run", listener=listener)
    if arguments.workers is None:
        arguments.workers = max(int(result.summary["loader"]["num_workers"]), 1)
    return listener.at


def _plain(folder: Path, arguments: argparse.Namespace, *, workers: int, persistent: bool = False) -> list[float]:
    """The loop that people write."""
    import torchvision

    loader = torch.utils.data.DataLoader(
        torchvision.datasets.ImageFolder(str(folder / "pictures"), picture_transform()), batch_size=arguments.batch,
        shuffle=True, num_workers=workers, persistent_workers=persistent,
        pin_memory=arguments.device == "cuda",
    )  # fmt: skip
    if arguments.stand_in is None:
        model: Any = torchvision.models.resnet18(num_classes=CLASSES)
    else:
        name = _model_name(folder, arguments).removeprefix("py:")
        model = python_factory.load_function(name, knobs={}, device=torch.device("cpu"), dtype=None)
    model.to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends = []
    for _ in range(arguments.epochs):
        for pictures, labels in loader:
            optimizer.zero_grad()
            output = model(pictures.to(arguments.device, non_blocking=True))
            loss = torch.nn.functional.cross_entropy(output, labels.to(arguments.device, non_blocking=True))
            loss.backward()
            optimizer.step()
        float(loss.detach())
        ends.append(time.perf_counter())
    return ends


if __name__ == "__main__":
    main()
