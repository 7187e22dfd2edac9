"""Training where memory is real: the allocator's limit, its errors, its random generator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from brim.settings.train_request import TrainRequest
from brim.settings.train_settings import train_settings
from brim.training.listener import StepRecord, TrainListener
from brim.training.run import TrainResult, run_training

pytestmark = pytest.mark.gpu

# Activations of 16 MiB a sample: a limit of some hundred MiB is soon reached.
NETS = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self, outputs, dropout):
        super().__init__()
        self.first = nn.Linear(6, 2**20, bias=False)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(2**20, outputs)

    def forward(self, rows):
        return self.last(self.drop(torch.tanh(self.first(rows))))

def wide(num_classes: int = 3, dropout: float = 0.0):
    return Wide(num_classes, dropout)
"""


class Watcher(TrainListener):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[StepRecord] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


def nested(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "nets.py").write_text(NETS, encoding="utf-8")
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((288, 6)).astype("float32")
    numpy.savez(folder / "features.npz", features=rows, labels=rows[:, :3].argmax(axis=1))
    settings: dict[str, Any] = {
        "model.type": f"py:{folder / 'nets.py'}:wide",
        "data.root": str(folder / "features.npz"),
        "data.type": "features",
        "hp.epochs": 1,
        "hp.effective_batch": 128,
        "hp.learning_rate": 1e-4,
        "optimizer.name": "sgd",
        "training.device": "cuda",
        "training.dtype": "float32",
    }
    return {**settings, **{name.replace("__", "."): value for name, value in changes.items()}}


def run(settings: dict[str, Any], folder: Path, **options: Any) -> TrainResult:
    listener = options.pop("listener", None)
    request = TrainRequest(settings=train_settings(settings), **{"use_cache": False, **options})
    return run_training(request, output=folder, listener=listener)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "weights-last.safetensors")


def test_under_a_limit_the_size_is_found_without_running_out(tmp_path: Path) -> None:
    result = run(nested(tmp_path, hp__epochs=4, training__memory_limit="800MiB"), tmp_path / "run")
    assert result.summary["oom_events"] == 0
    assert result.summary["peak_reserved_bytes"] <= 800 * 2**20
    assert 2 <= result.summary["micro_batch_size"] < 128
    assert result.summary["effective_batch_size"] == 128
    assert result.plan is not None
    assert result.plan.memory.headroom_bytes is not None
    (chosen,) = (probe for probe in result.plan.probes if probe.batch_size == result.summary["micro_batch_size"])
    assert (chosen.verdict, chosen.alloc_retries) == ("fits", 0)  # on the way there the allocator may have tried again


def test_a_micro_batch_that_does_not_fit_is_survived_and_changes_nothing(tmp_path: Path) -> None:
    watcher = Watcher()
    tight = run(
        nested(tmp_path, hp__batch_size=128, training__memory_limit="800MiB"), tmp_path / "tight", listener=watcher
    )
    run(nested(tmp_path, hp__batch_size=128), tmp_path / "free")
    assert tight.summary["oom_events"] > 0
    assert any("runs again in smaller ones" in note for note in watcher.notes)
    assert losses(tmp_path / "tight") == pytest.approx(losses(tmp_path / "free"), rel=1e-4)
    found, other = weights(tmp_path / "tight"), weights(tmp_path / "free")
    for name in found:
        torch.testing.assert_close(found[name], other[name], rtol=1e-3, atol=1e-5)


def test_the_limit_is_lifted_after_the_run(tmp_path: Path) -> None:
    run(nested(tmp_path, hp__max_steps=1, training__memory_limit="800MiB"), tmp_path / "run")
    torch.cuda.empty_cache()
    held = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
    assert held.numel() == 2 * 2**30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_stopped_run_resumes_with_the_same_losses(tmp_path: Path, dtype: str) -> None:
    settings = nested(tmp_path, hp__epochs=4, hp__batch_size=32, training__dtype=dtype, model__params={"dropout": 0.3})
    run(settings, tmp_path / "whole")
    run({**settings, "hp.epochs": 2}, tmp_path / "parts")
    run(settings, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_a_video_model_learns_moving_shapes(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    settings = {
        "model.type": "torchvision:r3d_18",
        "data.params": {"samples": 256, "val_samples": 64, "classes": 4},
        "hp.frames": 8,
        "hp.size": 48,
        "hp.epochs": 6,
        "hp.effective_batch": 32,
        "training.device": "cuda",
        "training.dtype": "bfloat16",
    }
    watcher = Watcher()
    result = run(settings, tmp_path / "run", listener=watcher)
    assert result.metrics["top1"]["mean"] > 0.6  # by chance: a quarter
    assert result.summary["peak_reserved_bytes"] > 0
    assert any("moving shapes" in note for note in watcher.notes)
    assert any("batch normalisation" in note for note in watcher.notes)


def test_comparing_batches_measures_memory_and_forecasts_it(tmp_path: Path) -> None:
    from brim.training.compare import compare_effective_batches

    request = TrainRequest(settings=train_settings(nested(tmp_path)), use_cache=False)
    small, large = compare_effective_batches(request, [8, 64]).rows
    assert small["peak_reserved_bytes"] < large["peak_reserved_bytes"]
    assert large["samples_per_second"] > 0
    assert small["headroom_fraction"] is not None
    assert small["risk"] == "low"
