"""A seed that was trained through the fast path is the seed that the loop trains alone: losses, figures, weights."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy
import pytest

import brim
from brim.training.run import TrainResult
from tests.training.training_runs import (
    largest_difference,
    losses,
    record_of,
    run,
    settings_of,
    weights,
    write_features,
)

SEEDS = (2, 3, 4, 5, 6)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd, cosine with a warm-up": {
        "optimizer__name": "sgd", "hp__weight_decay": 0.01, "scheduler__name": "cosine",
        "scheduler__warmup_epochs": 1, "hp__learning_rate": 0.05,
    },
    "adam, clipped, smoothed, steps": {
        "optimizer__name": "adam", "training__gradient_clip": 0.2, "hp__label_smoothing": 0.1,
        "scheduler__name": "step", "hp__weight_decay": 0.1,
    },
    "scaled rate and betas": {"hp__base_batch": 4, "training__lr_scale": "sqrt", "training__scale_betas": True},
    "early stopping": {"hp__epochs": 30, "hp__learning_rate": 0.3, "training__early_stopping": 2},
    "by the loss, every second epoch": {"training__monitor": "loss", "training__eval_every": 2},
    "no validation": {"data__val_split": "none"},
    "as many steps as two epochs": {"hp__max_steps": 28},
    "float32": {"training__dtype": "float32"},
    "bfloat16": {"training__dtype": "bfloat16"},
}  # fmt: skip


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("data") / "features.npz", count=240)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((150, 5)).astype("float32")
    path = tmp_path_factory.mktemp("data") / "values.npz"
    numpy.savez(path, features=rows, labels=rows[:, 0] - 0.5 * rows[:, 1])
    return path


def stacked(nested: dict[str, Any], folder: Path, path: str = "stacked", **options: Any) -> TrainResult:
    return brim.fit(nested, seeds=SEEDS, fast_path=path, output=folder, use_cache=False, **options)


def alone(nested: dict[str, Any], seed: int, folder: Path) -> TrainResult:
    return run({**nested, "hp": {**nested["hp"], "seed": seed}}, folder)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "epochs.csv").open() as file:
        return list(csv.DictReader(file))


def assert_equal(nested: dict[str, Any], together: TrainResult, seed: int, tmp_path: Path) -> None:
    tolerance = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05}[nested["training"]["dtype"]]
    own, other = tmp_path / f"alone-{seed}", together.folder / f"seed-{seed}"
    single = alone(nested, seed, own)
    assert losses(other) == pytest.approx(losses(own), abs=tolerance)
    summary = record_of(other)["summary"]
    for name in ("best_epoch", "epochs", "steps", "samples", "stopped_early"):
        assert summary[name] == single.summary[name]
    for name, figure in single.metrics.items():
        value = together.metrics[name]["values"][SEEDS.index(seed)]
        assert value == pytest.approx(figure["mean"], abs=tolerance)
    for which in ("best", "last"):
        assert largest_difference(weights(other, which), weights(own, which)) < tolerance
    for ours, theirs in zip(rows_of(other), rows_of(own), strict=True):
        held_out = [name for name in theirs if name.startswith("val_")]
        assert held_out == [name for name in ours if name.startswith("val_")]
        for name in ("epoch", "step", "samples", "train_loss", "learning_rate", "effective_batch", *held_out):
            assert bool(ours[name]) == bool(theirs[name])
            assert float(ours[name] or 0) == pytest.approx(float(theirs[name] or 0), abs=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_seed_of_a_stack_is_the_one_that_the_loop_trains(name: str, features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, **CASES[name])
    together = stacked(nested, tmp_path / "together")
    assert together.summary["fast_path"] == "stacked"
    assert together.summary["fast_path_choice"]["stack"] > 1
    assert together.summary["seeds"] == list(SEEDS)
    for seed in SEEDS[:3] if name == "early stopping" else SEEDS[-1:]:
        assert_equal(nested, together, seed, tmp_path)


def test_seeds_stop_early_each_at_its_own_epoch(features: Path, tmp_path: Path) -> None:
    together = stacked(settings_of(features, **CASES["early stopping"]), tmp_path / "together")
    lengths = [row["epochs"] for row in together.summary["runs"]]
    assert len(set(lengths)) > 1
    assert max(lengths) < 30
    assert together.summary["num_stopped_early"] == len(SEEDS)


@pytest.mark.parametrize("path", ["stacked", "resident"])
def test_values_are_learnt_as_by_the_loop(path: str, values: Path, tmp_path: Path) -> None:
    nested = settings_of(values, hp__learning_rate=0.02)
    together = stacked(nested, tmp_path / "together", path)
    assert together.summary["fast_path"] == path
    assert set(together.metrics) == {"train_loss", "val_loss", "mae"}
    assert_equal(nested, together, SEEDS[0], tmp_path)


def test_a_model_of_ones_own_is_stacked_too(features: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\ndef make(num_classes: int = 3):\n"
        "    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, num_classes))\n"
    )
    nested = settings_of(features, model__type=f"py:{tmp_path / 'own.py'}:make", data__type="features")
    nested["model"].pop("params")
    together = stacked(nested, tmp_path / "together")
    assert together.summary["fast_path"] == "stacked"
    other = alone(nested, SEEDS[0], tmp_path / "alone")
    assert losses(together.folder / "seed-2") == pytest.approx(losses(tmp_path / "alone"), abs=1e-10)
    assert together.metrics["top1"]["values"][0] == other.metrics["top1"]["mean"]


def test_stacked_learning_rates_equal_those_of_single_runs(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, scheduler__name="cosine", scheduler__params__eta_min=0.001)
    together = brim.fit(
        nested, seeds=2, learning_rates=(0.02, 0.004), fast_path="stacked", output=tmp_path / "together"
    )
    assert [row["learning_rate"] for row in together.summary["learning_rates"]] == [0.02, 0.004]
    assert sorted(row["name"] for row in together.summary["runs"]) == [
        "seed-0-lr-0.004", "seed-0-lr-0.02", "seed-1-lr-0.004", "seed-1-lr-0.02",
    ]  # fmt: skip
    for rate in (0.02, 0.004):
        other = run({**nested, "hp": {**nested["hp"], "seed": 1, "learning_rate": rate}}, tmp_path / f"alone-{rate}")
        folder = together.folder / f"seed-1-lr-{rate:g}"
        assert losses(folder) == pytest.approx(losses(other.folder), abs=1e-10)
        assert largest_difference(weights(folder), weights(other.folder)) < 1e-10
    better = max(together.summary["learning_rates"], key=lambda row: row["metrics"]["top1"]["mean"])
    assert together.metrics == better["metrics"]
