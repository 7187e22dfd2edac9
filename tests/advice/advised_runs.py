"""Small runs, each slow for one known reason, that tests of advice share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import brim
from brim.advice.advise import advise_run
from brim.advice.base import Advice
from brim.advice.run_reader import Run, open_run
from brim.advice.run_requests import eval_request, train_request
from brim.evaluation.run import evaluate
from brim.training.run import run_training
from tests import saved_models
from tests.training import training_runs

SLOW_ROWS = """
import os
import time

import torch
from torch import nn


class Rows:
    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        with open(LOG, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(self.seconds)
        return torch.full((3,), float(item % 2)), item % 2


def rows(count: int = 32, seconds: float = 0.05):
    return lambda name: Rows(count, seconds) if name == "train" else None


def net(num_classes: int = 2):
    return nn.Linear(3, num_classes)
"""


def write_questions(path: Path, lengths: Iterable[int], *, seed: int = 0) -> Path:
    """Questions of so many words each, all of them in the tokenizer of the saved models."""
    draw = random.Random(seed)
    lines = [
        {
            "id": f"q{n}",
            "question": " ".join(draw.choice(saved_models.WORDS[:24]) for _ in range(length)),
            "answer": "1",
        }
        for n, length in enumerate(lengths)
    ]
    return write_lines(path, lines)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def evaluated(model: Path, data: Path, folder: Path, **settings: Any) -> Run:
    brim.evaluate(str(model), data, output=folder, device="cpu", no_cache=True, **settings)
    return open_run(folder)


def trained(nested: dict[str, Any], folder: Path) -> Run:
    training_runs.run(nested, folder)
    return open_run(folder)


def slow_loader(folder: Path) -> tuple[Run, Path]:
    """A training run whose samples take a twentieth of a second each; and the log of who prepared them."""
    file, log = folder / "slow.py", folder / "prepared.log"
    file.write_text(f"LOG = {str(log)!r}\n{SLOW_ROWS}", encoding="utf-8")
    nested = training_runs.model_settings(
        model__type=f"py:{file}:net", data__type=f"py:{file}:rows", hp__epochs=2,
        data__num_workers=0,
    )  # fmt: skip
    del nested["data"]["root"]
    return trained(nested, folder / "run"), log


def followed(run: Run, piece: Advice, folder: Path) -> Run:
    """The same run with a piece of advice."""
    if run.kind == "train":
        run_training(train_request(run, piece.settings), output=folder)
    else:
        evaluate(eval_request(run, piece.settings), output=folder)
    return open_run(folder)


def first_advice(run: Run) -> Advice:
    return advise_run(run)[0]
