"""Small training runs that several tests share."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy
import torch

from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import train_settings
from brim.training.listener import StepRecord, TrainFacts, TrainListener
from brim.training.run import TrainResult, run_training


class Watcher(TrainListener):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.facts: TrainFacts | None = None
        self.notes: list[str] = []
        self.steps: list[StepRecord] = []
        self.rows: list[dict[str, Any]] = []

    def opened(self, facts: TrainFacts) -> None:
        self.facts = facts

    def note(self, line: str) -> None:
        self.notes.append(line)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def epoch(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


class StopsAt(Watcher):
    """Asks to stop once a step's loss is known: as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if record.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def write_features(path: Path, *, count: int = 96, width: int = 6, classes: int = 3, seed: int = 0) -> Path:
    """Rows whose class is the largest of the first columns: a small head learns it."""
    draw = numpy.random.default_rng(seed)
    rows = draw.standard_normal((count, width)).astype("float32")
    numpy.savez(path, features=rows, labels=rows[:, :classes].argmax(axis=1))
    return path


def settings_of(path: Path, **changes: Any) -> dict[str, Any]:
    """A run of three epochs over features, in double precision so that sums can be compared; dotted keys change it."""
    nested: dict[str, Any] = {
        "model": {"type": "mlp", "params": {"hidden": [16]}},
        "data": {"root": str(path)},
        "hp": {"epochs": 3, "effective_batch": 16, "learning_rate": 0.01},
        "optimizer": {"params": {}},
        "scheduler": {},
        "training": {"device": "cpu", "dtype": "float64"},
    }
    for dotted, value in changes.items():
        section, _, name = dotted.replace("__", ".").partition(".")
        place = nested.setdefault(section, {})
        *inner, last = name.split(".")
        for step in inner:
            place = place.setdefault(step, {})
        place[last] = value
    return nested


def request_of(nested: dict[str, Any], **options: Any) -> TrainRequest:
    return TrainRequest(settings=train_settings(nested), **{"use_cache": False, **options})


def run(nested: dict[str, Any], folder: Path, *, listener: TrainListener | None = None, **options: Any) -> TrainResult:
    return run_training(request_of(nested, **options), output=folder, listener=listener)


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"weights-{which}.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def losses(folder: Path) -> list[float]:
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return record


def model_settings(**changes: Any) -> dict[str, Any]:
    """Settings for any model and data: float32, two epochs, and no parameters of `mlp`."""
    nested = settings_of(Path("unused"), **{"training__dtype": "float32", "hp__epochs": 2, **changes})
    nested["model"].pop("params") if "model__params" not in changes else None
    return nested
