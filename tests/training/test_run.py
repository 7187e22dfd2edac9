"""Whole runs on the CPU: what is learnt, what is recorded, and what happens when something is wrong."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import brim
from brim.errors import BrimError, DoesNotFitError, RequestError
from brim.training.listener import StepRecord
from brim.training.objective import Batch, Classification, LossSum
from tests.fake_devices import fake_current_devices
from tests.training.training_runs import (
    Watcher,
    largest_difference,
    losses,
    record_of,
    run,
    settings_of,
    weights,
    write_features,
)

SUMMARY = (
    "metrics", "samples_per_second", "micro_batch_size", "effective_batch_size", "accumulation_steps",
    "eval_batch_size", "oom_events", "peak_allocated_bytes", "peak_reserved_bytes", "fast_path",
    "batch_size_used", "batch_sizes", "batch_size_max", "gpu_utilisation_mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("data") / "features.npz", count=240)


def test_a_run_learns_and_writes_a_complete_record(features: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    result = run(settings_of(features, hp__epochs=12), tmp_path / "run", listener=watcher)
    record = record_of(tmp_path / "run")
    assert record["schema"] == "brim.run/1"
    assert record["kind"] == "train"
    assert {"request", "environment", "plan", "summary", "started_at", "ended_at", "duration_seconds"} <= set(record)
    summary = record["summary"]
    assert set(SUMMARY) <= set(summary)
    assert summary["metrics"]["top1"]["mean"] > 0.8
    assert summary["metrics"]["top1"]["values"] == [summary["metrics"]["top1"]["mean"]]
    assert summary["metrics"]["top1"]["deviation"] is None
    assert summary["effective_batch_size"] == 16
    assert summary["accumulation_steps"] * summary["micro_batch_size"] >= 16
    assert summary["steps"] == 12 * 14  # 216 samples in windows of 16: 13 and a half
    assert summary["samples"] == 12 * 216
    assert summary["oom_events"] == 0
    assert [row["epoch"] for row in watcher.rows] == list(range(12))
    assert watcher.rows[-1]["train_loss"] < 0.5 * watcher.rows[0]["train_loss"]
    assert result.metrics == summary["metrics"]
    assert (tmp_path / "run" / "monitor.csv").is_file()
    with (tmp_path / "run" / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert float(rows[-1]["val_top1"]) == watcher.rows[-1]["val_top1"]
    marks = summary["throughput"]
    assert len(marks) <= 100
    assert marks == sorted(marks)
    assert marks[-1][1] == summary["samples"]
    assert marks[-1][0] <= summary["seconds"] * 1.001  # of training alone: neither validation nor checkpoints
    assert summary["checkpoint_seconds"] > 0
    curve = summary["loss_curve"]
    assert curve[-1]["samples"] == summary["samples"]
    assert len(curve) <= 200
    assert json.loads((tmp_path / "run" / "steps.jsonl").read_text().splitlines()[0])["step"] == 1


def test_the_device_is_cudas_current_one_while_steps_are_made(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory of loading processes and the generator in a checkpoint are those of the current device."""
    current = fake_current_devices(monkeypatch, "brim.training.run")

    class Steps(Watcher):
        def step(self, record: StepRecord) -> None:
            super().step(record)
            assert current == [torch.device("cpu")]

    steps = Steps()
    run(settings_of(features, hp__max_steps=3), tmp_path / "run", listener=steps)
    assert len(steps.steps) == 3
    assert current == []


def test_best_weights_are_those_of_the_best_epoch(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, hp__epochs=8, hp__learning_rate=0.2, hp__batch_size=16)
    result = run(nested, tmp_path / "run")
    best = result.summary["best_epoch"]
    figures = [row["val_top1"] for row in result.epochs]
    assert figures[best] == max(figures)
    best_loss = min(row["val_loss"] for row in result.epochs if row["val_top1"] == max(figures))
    assert result.epochs[best]["val_loss"] == best_loss  # of several as good, the one with the lowest loss
    run(nested | {"hp": nested["hp"] | {"epochs": best + 1}}, tmp_path / "short")
    assert largest_difference(weights(tmp_path / "run", "best"), weights(tmp_path / "short", "last")) == 0


def test_micro_batches_change_nothing_that_is_learnt(features: Path, tmp_path: Path) -> None:
    for name, size in (("whole", 16), ("halves", 8), ("single", 1)):
        run(settings_of(features, hp__batch_size=size), tmp_path / name)
    run(settings_of(features), tmp_path / "auto")
    for other in ("halves", "single", "auto"):
        assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / other)) < 1e-10


def test_a_memory_limit_is_kept_and_the_weights_are_those_without_it(features: Path, tmp_path: Path) -> None:
    run(settings_of(features, hp__batch_size=16), tmp_path / "free")
    watcher = Watcher()
    nested = settings_of(features, hp__batch_size=16, training__memory_limit="9000")
    result = run(nested, tmp_path / "tight", listener=watcher)
    assert result.summary["oom_events"] > 0
    assert result.summary["peak_allocated_bytes"] <= 9000
    assert result.summary["micro_batch_size"] < 16
    assert result.summary["effective_batch_size"] == 16
    assert any("runs again in smaller ones" in note for note in watcher.notes)
    assert largest_difference(weights(tmp_path / "free"), weights(tmp_path / "tight")) < 1e-10
    verdicts = {probe["verdict"] for probe in record_of(tmp_path / "tight")["plan"]["probes"]}
    assert {"fits", "oom"} <= verdicts


def test_under_a_limit_the_size_is_found_without_running_out(features: Path, tmp_path: Path) -> None:
    """The byte model, with what does not exist yet reserved, stops the growth in time."""
    nested = settings_of(features, hp__effective_batch=128, training__memory_limit="40KiB")
    result = run(nested, tmp_path / "run")
    assert result.summary["oom_events"] == 0
    assert 2 < result.summary["batch_sizes"]["largest"] < 128
    assert result.summary["peak_allocated_bytes"] <= 40 * 1024
    assert result.plan is not None
    assert "confirmed after the second optimizer step" in result.plan.reason
    assert result.plan.memory.headroom_bytes is not None


def test_a_validation_batch_that_does_not_fit_is_split(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, hp__batch_size=4, hp__epochs=1, data__val_fraction=0.5)
    free = run(nested | {"training": {**nested["training"], "eval_batch_size": 120}}, tmp_path / "free")
    tight = {**nested["training"], "eval_batch_size": 120, "memory_limit": "9000"}
    result = run(nested | {"training": tight}, tmp_path / "tight")
    assert result.summary["oom_events"] > 0
    assert result.summary["eval_batch_size"] < 120
    assert free.summary["eval_batch_size"] == 120
    assert result.metrics["val_loss"]["mean"] == pytest.approx(free.metrics["val_loss"]["mean"], abs=1e-12)


def test_nothing_fits_is_exit_3_with_remedies(features: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="What may help"):
        run(settings_of(features, training__memory_limit="3000"), tmp_path / "run")


def test_optimizer_state_that_does_not_fit_is_named(features: Path, tmp_path: Path) -> None:
    """A micro-batch of one fits, Adam's state beside it does not: weights are as before the step."""
    with pytest.raises(DoesNotFitError, match="gradients and optimizer state do not fit"):
        run(settings_of(features, hp__batch_size=1, training__memory_limit="5000"), tmp_path / "run")


def test_early_stopping_ends_a_run_that_gets_no_better(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, hp__epochs=50, hp__learning_rate=1e-9, training__early_stopping=3)
    result = run(nested, tmp_path / "run")
    assert result.summary["stopped_early"]
    assert result.summary["epochs"] < 20


def test_max_steps_ends_a_run_in_the_middle_of_an_epoch(features: Path, tmp_path: Path) -> None:
    result = run(settings_of(features, hp__max_steps=17), tmp_path / "run")
    assert result.summary["steps"] == 17
    assert len(losses(tmp_path / "run")) == 17
    assert result.epochs[-1]["val_loss"] > 0  # validated all the same


def test_regression_on_values(tmp_path: Path) -> None:
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((200, 4)).astype("float32")
    numpy.savez(tmp_path / "values.npz", features=rows, labels=rows @ [1.0, -2.0, 0.5, 0.0] + 0.25)
    result = run(settings_of(tmp_path / "values.npz", hp__epochs=25), tmp_path / "run")
    assert result.metrics["mae"]["mean"] < 0.3
    assert result.metrics["val_loss"]["mean"] < 0.2
    assert record_of(tmp_path / "run")["request"]["task"] == "regress"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_autocast_over_float32_weights(features: Path, tmp_path: Path, dtype: str) -> None:
    run(settings_of(features, hp__epochs=6, training__dtype=dtype), tmp_path / "run")
    assert weights(tmp_path / "run")["layers.0.weight"].dtype == torch.float32
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_gradient_clipping_bounds_a_step(features: Path, tmp_path: Path) -> None:
    changes = {"optimizer__name": "sgd", "optimizer__params": {"momentum": 0.0}, "hp__max_steps": 1,
               "hp__learning_rate": 1.0}  # fmt: skip
    run(settings_of(features, **changes, hp__epochs=1), tmp_path / "free")
    run(settings_of(features, **changes, hp__epochs=1, training__gradient_clip=1e-6), tmp_path / "clipped")
    before = weights(tmp_path / "clipped")
    moved = largest_difference(before, weights(tmp_path / "free"))
    assert moved > 1e-3  # the free one went far, the clipped one stayed within a millionth of the start


def test_gradient_checkpointing_learns_the_same(tmp_path: Path) -> None:
    net = tmp_path / "nets.py"
    net.write_text(BLOCKS, encoding="utf-8")
    write_features(tmp_path / "features.npz")
    nested = settings_of(tmp_path / "features.npz", model__params={}, data__type="features", hp__batch_size=16)
    nested["model"]["type"] = f"py:{net}:blocks"
    run(nested, tmp_path / "plain")
    nested["training"]["gradient_checkpointing"] = True
    watcher = Watcher()
    run(nested, tmp_path / "checkpointed", listener=watcher)
    assert any("gradient checkpointing: 3 blocks" in note for note in watcher.notes)
    assert largest_difference(weights(tmp_path / "plain"), weights(tmp_path / "checkpointed")) < 1e-12


def test_the_learning_rate_follows_the_effective_batch(features: Path, tmp_path: Path) -> None:
    changes = {"hp__effective_batch": 64, "hp__base_batch": 16, "training__lr_scale": "sqrt"}
    watcher = Watcher()
    result = run(settings_of(features, **changes), tmp_path / "run", listener=watcher)
    assert result.summary["learning_rate"]["factor"] == 2.0
    assert max(step.learning_rate for step in watcher.steps) == pytest.approx(0.02)
    assert watcher.steps[0].learning_rate < 0.01  # warm-up
    assert any("it warms up over" in note for note in watcher.notes)


def test_adams_betas_follow_where_that_was_asked_for(features: Path, tmp_path: Path) -> None:
    changes = {"hp__effective_batch": 64, "hp__base_batch": 16, "training__lr_scale": "sqrt",
               "training__scale_betas": True}  # fmt: skip
    run(settings_of(features, **changes), tmp_path / "run")
    state = json.loads(next((tmp_path / "run").glob("checkpoint-*/state.json")).read_text())
    assert state["optimizer"]["param_groups"][0]["betas"] == pytest.approx([0.6, 0.996])
    assert state["optimizer"]["param_groups"][0]["eps"] == pytest.approx(5e-9)


def test_a_batch_that_may_grow_follows_the_noise_scale(tmp_path: Path) -> None:
    """Labels that are partly wrong: gradients are mostly noise, and more samples help for long."""
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((512, 4)).astype("float32")
    labels = numpy.where(draw.random(512) < 0.45, draw.integers(0, 2, 512), rows[:, 0] > 0).astype(int)
    numpy.savez(tmp_path / "noisy.npz", features=rows, labels=labels)
    nested = settings_of(
        tmp_path / "noisy.npz", model__params={"hidden": [4]}, hp__epochs=24, hp__effective_batch="auto",
        hp__batch_size=8, data__val_split="none",
    )  # fmt: skip
    watcher = Watcher()
    result = run(nested, tmp_path / "run", listener=watcher)
    changes = result.summary["effective_batches"]
    assert [change["effective_batch"] for change in changes][:2] == [16, 32]
    assert result.summary["effective_batch_size"] <= 512
    assert result.summary["noise_scale"]["useful_batch"] >= 32
    assert result.summary["learning_rate"]["rule"] == "auto"
    before_the_next = watcher.steps[changes[1]["step"] - 1]
    assert before_the_next.learning_rate == pytest.approx(0.01 * 2**0.5)  # Adam: the square root
    assert {point["effective_batch"] for point in result.summary["loss_curve"]} >= {8, 16, 32}
    assert [step.samples for step in watcher.steps] == sorted({step.samples for step in watcher.steps})
    seen = sum(step.effective_batch for step in watcher.steps)
    assert seen == 24 * 512  # every sample in every epoch, whatever the batch
    run(nested | {"hp": nested["hp"] | {"epochs": 5}}, tmp_path / "parts")  # in the middle of the growth
    run(nested, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "run")


def test_an_effective_batch_beyond_the_data_is_the_data(features: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    result = run(settings_of(features, hp__effective_batch=8192), tmp_path / "run", listener=watcher)
    assert result.summary["effective_batch_size"] == 216
    assert any("8192 is more than the 216 training samples" in note for note in watcher.notes)


def test_without_batches_the_effective_batch_is_noted(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features)
    del nested["hp"]["effective_batch"]
    watcher = Watcher()
    result = run(nested, tmp_path / "run", listener=watcher)
    assert result.summary["effective_batch_size"] == 27  # an eighth of the data
    assert any("the effective batch is 27" in note for note in watcher.notes)


def test_a_plan_of_an_earlier_run_brings_its_sizes_back(features: Path, tmp_path: Path) -> None:
    first = run(
        settings_of(features, hp__effective_batch=48, hp__batch_size=12, training__eval_batch_size=6), tmp_path / "a"
    )
    nested = settings_of(features)
    del nested["hp"]["effective_batch"]
    again = run(nested, tmp_path / "b", plan=str(tmp_path / "a"))
    for field in ("effective_batch_size", "micro_batch_size", "accumulation_steps", "eval_batch_size"):
        assert again.summary[field] == first.summary[field]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_found_size_is_cached_for_the_next_run(features: Path, tmp_path: Path, own_cache_folder: Path) -> None:
    nested = settings_of(features, hp__epochs=6)
    first = run(nested, tmp_path / "a", use_cache=True)
    again = run(nested, tmp_path / "b", use_cache=True)
    assert first.plan is not None
    assert again.plan is not None
    assert not first.plan.cached
    assert again.plan.cached
    assert again.plan.size == first.plan.size
    first_step = json.loads((tmp_path / "b" / "steps.jsonl").read_text().splitlines()[0])
    assert max(first_step["micro_batches"]) == min(first.plan.size, 16)  # no search
    (file,) = (own_cache_folder / "brim" / "plans").glob("*.json")
    file.write_text(re.sub(r'"batch_size_max": \d+', '"batch_size_max": "x"', file.read_text()))
    damaged = run(nested, tmp_path / "c", use_cache=True)
    assert damaged.plan is not None
    assert not damaged.plan.cached
    assert any(str(file) in note for note in damaged.notes)


def test_a_loss_that_is_no_number_ends_the_run_with_what_is_needed(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Classification.loss

    def poisoned(self: Classification, model: nn.Module, batch: Batch) -> LossSum:
        found = plain(self, model, batch)
        bad = torch.isclose(batch.inputs[:, 0], torch.tensor(7.0, dtype=torch.float64)).any()
        return LossSum(found.total * float("nan"), found.weight) if bad else found

    with numpy.load(features) as loaded:
        rows, labels = loaded["features"].copy(), loaded["labels"]
    rows[100, 0] = 7.0
    numpy.savez(tmp_path / "poison.npz", features=rows, labels=labels)
    monkeypatch.setattr(Classification, "loss", poisoned)
    nested = settings_of(
        tmp_path / "poison.npz", hp__batch_size=4, training__checkpoint_every=1, data__val_split="none"
    )
    with pytest.raises(BrimError, match="the loss is nan") as caught:
        run(nested, tmp_path / "run")
    assert caught.value.exit_code == 1
    told = json.loads((tmp_path / "run" / "bad_batch.json").read_text())
    assert "100" in told["ids"]
    assert len(told["ids"]) <= 4  # the micro-batch, not the window
    assert f"step {told['step']}" in str(caught.value)
    if told["step"] > 1:
        checkpoint = json.loads((tmp_path / "run" / "checkpoint.json").read_text())
        assert checkpoint["folder"] in str(caught.value)
        assert checkpoint["step"] == told["step"] - 1  # the last good one, and good it is
        found = next((tmp_path / "run").glob("checkpoint-*"))
        from safetensors.torch import load_file

        assert all(torch.isfinite(tensor).all() for tensor in load_file(found / "model.safetensors").values())


def test_synchronised_batch_normalisation_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(BLOCKS, encoding="utf-8")
    write_features(tmp_path / "features.npz")
    nested = settings_of(tmp_path / "features.npz", model__params={}, data__type="features")
    nested["model"]["type"] = f"py:{tmp_path / 'nets.py'}:synced"
    with pytest.raises(RequestError, match="is SyncBatchNorm"):
        run(nested, tmp_path / "run")


def test_batch_normalisation_of_single_values_refuses_a_batch_of_one(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(BLOCKS, encoding="utf-8")
    write_features(tmp_path / "features.npz", count=70)  # 63 to learn from: 31 pairs and a lone one
    nested = settings_of(tmp_path / "features.npz", model__params={}, data__type="features", hp__effective_batch=1)
    nested["model"]["type"] = f"py:{tmp_path / 'nets.py'}:normalised"
    with pytest.raises(RequestError, match="batch normalisation needs at least 2 samples"):
        run(nested, tmp_path / "one")
    nested["hp"]["effective_batch"] = 2
    result = run(nested, tmp_path / "two")
    assert result.summary["samples"] == 3 * 63  # the lone sample went with the pair before it
    assert result.summary["steps"] == 3 * 31


def test_fit_trains_from_python(features: Path, tmp_path: Path) -> None:
    result = brim.fit(settings_of(features), output=tmp_path / "run", use_cache=False)
    assert result.summary["epochs"] == 3
    with pytest.raises(RequestError, match="did you mean resume"):
        brim.fit(settings_of(features), resum=True)


BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    def forward(self, rows):
        return rows + self.inner(rows)

def blocks(num_classes: int = 3):
    return nn.Sequential(nn.Linear(6, 8), *[Block(8) for _ in range(3)], nn.Linear(8, num_classes))

def normalised(num_classes: int = 3):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))

def synced(num_classes: int = 3):
    return nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, num_classes))
"""
