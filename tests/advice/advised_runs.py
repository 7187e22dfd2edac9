"""How tests of advice make runs and follow advice; those that are slow for a known reason: benchmarks/slow_runs.py."""

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


def followed(run: Run, piece: Advice, folder: Path) -> Run:
    """The same run with a piece of advice."""
    if run.kind == "train":
        run_training(train_request(run, piece.settings), output=folder)
    else:
        evaluate(eval_request(run, piece.settings), output=folder)
    return open_run(folder)


def first_advice(run: Run) -> Advice:
    return advise_run(run)[0]
