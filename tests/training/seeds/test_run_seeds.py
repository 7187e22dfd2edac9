"""Several seeds as one training: its record, what is refused the fast path, failures, interrupts and resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import brim
from brim.advice.run_reader import open_run
from brim.errors import RequestError
from brim.ranks.world import World
from brim.reporting.drawing import draw
from brim.reporting.write import page_of
from brim.training.fast_path.stacked_epochs import StackTrainer
from brim.training.heads import FeatureHead
from brim.training.run import TrainResult, run_training
from brim.training.seeds import run as seeds_run
from brim.training.seeds.run import run_seeds
from tests.training.training_runs import Watcher, losses, record_of, request_of, settings_of, weights, write_features

SUMMARY = (
    "metrics", "samples_per_second", "micro_batch_size", "effective_batch_size", "accumulation_steps",
    "eval_batch_size", "oom_events", "peak_allocated_bytes", "peak_reserved_bytes", "fast_path", "batch_size_used",
    "batch_sizes", "batch_size_max", "gpu_utilisation_mean", "loss_curve", "seeds",
)  # fmt: skip


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("data") / "features.npz", count=120)


def train(nested: dict[str, Any], folder: Path, *, seeds: Sequence[int] = (0, 1, 2), **options: Any) -> TrainResult:
    listener = options.pop("listener", None)
    return run_seeds(request_of(nested, seeds=tuple(seeds), **options), output=folder, listener=listener)


def reason(result: TrainResult) -> str:
    assert result.summary["fast_path"] == "off"
    return str(result.summary["fast_path_choice"]["reason"])


def test_the_record_has_every_seed_and_the_totals(features: Path, tmp_path: Path) -> None:
    result = train(settings_of(features), tmp_path / "run", fast_path="stacked")
    record = record_of(tmp_path / "run")
    summary = record["summary"]
    assert record["kind"] == "train"
    assert record["request"]["seeds"] == [0, 1, 2]
    assert set(SUMMARY) <= set(summary)
    top1 = summary["metrics"]["top1"]
    assert len(top1["values"]) == 3
    assert top1["mean"] == pytest.approx(numpy.mean(top1["values"]))
    assert top1["deviation"] == pytest.approx(numpy.std(top1["values"], ddof=1))
    assert (summary["fast_path"], summary["fast_path_choice"]["stack"]) == ("stacked", 3)
    assert (summary["micro_batch_size"], summary["accumulation_steps"], summary["effective_batch_size"]) == (16, 1, 16)
    assert summary["eval_batch_size"] == 12
    assert summary["samples"] == 3 * 3 * 108
    assert summary["samples_per_second"] > 0
    assert record["plan"]["size"] == 16
    for seed, value in zip((0, 1, 2), top1["values"], strict=True):
        own = record_of(tmp_path / "run" / f"seed-{seed}")
        assert own["summary"]["metrics"]["top1"]["mean"] == value
        assert own["request"]["settings"]["hp"]["seed"] == seed
        assert len(losses(tmp_path / "run" / f"seed-{seed}")) == 3 * 7
        assert set(weights(tmp_path / "run" / f"seed-{seed}", "best")) >= {"mean", "deviation", "layers.0.weight"}
    means = losses(tmp_path / "run")
    every = [losses(tmp_path / "run" / f"seed-{seed}") for seed in (0, 1, 2)]
    assert means == pytest.approx(numpy.mean(every, axis=0).tolist())
    assert result.epochs[-1]["runs"] == 3
    assert (tmp_path / "run" / "runs.csv").read_text().splitlines()[1].startswith("seed-0,0,0.01,seed-0,")


def test_the_page_shows_the_spread_and_each_seed_s_curve(features: Path, tmp_path: Path) -> None:
    train(settings_of(features), tmp_path / "run", fast_path="stacked")
    page = page_of(open_run(tmp_path / "run"))
    assert " ± " in page.headline
    assert page.headline.endswith("over 3 seeds")
    runs = next(section for section in page.sections if section.title == "Runs")
    assert [chart.title for chart in runs.charts] == [
        "Training loss of each run", "Validation loss of each run", "Top1 of each run",
    ]  # fmt: skip
    assert runs.table is not None
    assert [row[0].text for row in runs.table.cells()] == ["seed-0", "seed-1", "seed-2"]
    drawn = json.dumps(draw(runs.charts[0]))
    assert all(f"training loss: seed-{seed}" in drawn for seed in (0, 1, 2))
    assert [chart.title for section in page.sections if section.title == "Loss" for chart in section.charts]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"fast_path": "off"}, "asked for"),
        ({"model__params__dropout": 0.2}, {}, "draws noise"),
        ({"hp__batch_size": 4}, {}, "accumulated from micro-batches of 4"),
        ({"hp__effective_batch": "auto"}, {}, "grows with each seed's own noise"),
        ({"hp__max_steps": 8}, {}, "ends inside an epoch of 7 steps"),
        ({"scheduler__name": "plateau"}, {}, "follows each seed's own loss"),
        ({"scheduler__name": "onecycle"}, {}, "changes more than the learning rate"),
        ({"optimizer__name": "adafactor", "hp__learning_rate": 0.01}, {}, "adafactor with these options"),
        ({"optimizer__params__amsgrad": True}, {}, "adamw with these options"),
        ({"training__checkpoint_every": 3}, {}, "checkpoints inside an epoch"),
        ({"training__memory_limit": "10KiB"}, {}, "the rows take"),
        ({"training__memory_limit": "12KiB"}, {}, "the fast path does not fit"),
        ({}, {"seeds": (4,)}, "there is one run"),
    ],
)
def test_work_outside_the_fast_path_is_trained_seed_by_seed_with_a_note(
    changes: dict[str, Any], options: dict[str, Any], words: str, features: Path, tmp_path: Path
) -> None:
    watcher = Watcher()
    nested = settings_of(features, hp__epochs=2, **changes)
    result = train(nested, tmp_path / "run", listener=watcher, **{"seeds": (0, 1), **options})
    assert words in reason(result)
    assert any(words in note for note in watcher.notes) == (words != "asked for")
    seeds = options.get("seeds", (0, 1))
    assert len(result.metrics["top1"]["values"]) == len(seeds)
    for seed in seeds:
        assert (tmp_path / "run" / f"seed-{seed}" / "checkpoint.json").is_file()  # the loop's own


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))", "batch normalisation"),
        ("nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, num_classes)))", "buffers change"),
        ("Pair(nn.Linear(6, num_classes))", "gives list"),
        ("Own(nn.Linear(6, num_classes))", "a loss of its own"),
    ],
)
def test_a_model_unsuited_to_stacking_is_trained_by_the_loop(
    body: str, words: str, features: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\nfrom torch.nn import functional\n\n\n"
        "class Pair(nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n"
        "        self.inner = inner\n\n    def forward(self, rows):\n        return [self.inner(rows), None]\n\n\n"
        "class Own(Pair):\n    def training_loss(self, rows):\n        return self.inner(rows).square().sum(1)\n\n\n"
        f"def make(num_classes: int = 3):\n    return {body}\n"
    )
    nested = settings_of(features, model__type=f"py:{tmp_path / 'own.py'}:make", data__type="features", hp__epochs=1)
    nested["model"].pop("params")
    nested["training"] |= {"dtype": "float32"}
    assert words in reason(train(nested, tmp_path / "run", seeds=(0, 1)))


def test_pictures_are_trained_seed_by_seed_without_building_the_model_first(tmp_path: Path) -> None:
    nested = {
        "model": {"type": "timm:test_vit", "knobs": {"size": 160}},
        "data": {"params": {"samples": 8, "val_samples": 4, "classes": 2}},
        "hp": {"epochs": 1, "effective_batch": 4},
        "training": {"device": "cpu"},
    }
    assert "it learns from pictures" in reason(train(nested, tmp_path / "run", seeds=(0, 1)))


def test_stacked_dropout_is_optional_and_reproducible(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features, model__params__dropout=0.3)
    for name in ("one", "two"):
        assert train(nested, tmp_path / name, fast_path="stacked").summary["fast_path"] == "stacked"
    assert losses(tmp_path / "one" / "seed-1") == losses(tmp_path / "two" / "seed-1")
    run_training(request_of({**nested, "hp": {**nested["hp"], "seed": 1}}), output=tmp_path / "alone")
    assert losses(tmp_path / "one" / "seed-1") != losses(tmp_path / "alone")  # other noise than alone


@pytest.mark.parametrize("path", ["stacked", "off"])
def test_a_seed_whose_loss_is_no_number_fails_alone(
    path: str, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    made = FeatureHead.__init__

    def poisoned(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if torch.initial_seed() == 1:
            torch.nn.init.constant_(self.layers[0].weight, float("nan"))

    monkeypatch.setattr(FeatureHead, "__init__", poisoned)
    result = train(settings_of(features), tmp_path / "run", fast_path=path)
    assert len(result.failed) == 1
    assert "seed-1: " in result.failed[0]
    assert "the loss" in result.failed[0]
    assert result.summary["seeds"] == [0, 2]
    assert len(result.metrics["top1"]["values"]) == 2
    assert result.summary["num_failed"] == 1
    assert list(result.summary["errors"]) == ["seed-1"]
    assert not (tmp_path / "run" / "seed-1" / "run.json").exists()
    page = page_of(open_run(tmp_path / "run"))
    assert page.warnings[0].startswith("1 run failed, and the figures are without: seed-1")


def test_every_seed_failing_still_leaves_a_record(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(FeatureHead, "forward", lambda self, rows: self.layers(rows) * float("nan"))
    result = train(settings_of(features), tmp_path / "run", fast_path="stacked")
    assert len(result.failed) == 3
    assert result.metrics == {}
    assert page_of(open_run(tmp_path / "run")).headline


def test_an_interrupted_stack_keeps_the_stacks_before_it(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU stacks may be of four; here a stack of two, interrupted in the second."""
    from brim.training.fast_path.choose import PathChooser

    monkeypatch.setattr(PathChooser, "_stack_that_fits", lambda self, alone: 2)
    validate = StackTrainer.validate

    def interrupted(self: StackTrainer, running: Sequence[int]) -> Any:
        if self._runs.specs[0].seed == 2 and self.progress[0].epoch == 1:
            raise KeyboardInterrupt
        return validate(self, running)

    whole = train(settings_of(features), tmp_path / "whole", seeds=range(4), fast_path="stacked")
    watcher = Watcher()
    with monkeypatch.context() as patch:
        patch.setattr(StackTrainer, "validate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(settings_of(features), tmp_path / "run", seeds=range(4), fast_path="stacked", listener=watcher)
    assert "2 of 4 runs are done and kept, a stack under way begins again" in watcher.notes[-1]
    assert not (tmp_path / "run" / "run.json").exists()
    before = (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns
    result = train(settings_of(features), tmp_path / "run", seeds=range(4), fast_path="stacked", resume=True)
    assert (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns == before
    for name, figure in whole.metrics.items():
        assert result.metrics[name]["values"] == pytest.approx(figure["values"], abs=1e-12)


def test_an_interrupted_seed_resumes_and_finished_seeds_are_kept(features: Path, tmp_path: Path) -> None:
    class Stops(Watcher):
        """Ctrl-C in the middle of the second seed."""

        def run_begins(self, name: str) -> None:
            self.name = name

        def step(self, record: Any) -> None:
            super().step(record)
            if self.name == "seed-1" and record.epoch == 1:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGINT)

    nested = settings_of(features, hp__batch_size=16)
    whole = train(nested, tmp_path / "whole", fast_path="off")
    stops = Stops()
    with pytest.raises(KeyboardInterrupt):
        train(nested, tmp_path / "run", fast_path="off", listener=stops)
    assert "1 of 3 runs are done and kept" in stops.notes[-1]
    assert f"resume=True, output='{tmp_path / 'run'}'" in stops.notes[-1]
    assert not any("seed-1" in note for note in stops.notes)
    watcher = Watcher()
    result = train(nested, tmp_path / "run", fast_path="off", resume=True, listener=watcher)
    assert any(note.startswith("resumed after step") for note in watcher.notes)
    for name, figure in whole.metrics.items():  # validation finds its own batches, whose sums round differently
        assert result.metrics[name]["values"] == pytest.approx(figure["values"], rel=1e-6), name
    for seed in (0, 1, 2):
        assert losses(tmp_path / "run" / f"seed-{seed}") == losses(tmp_path / "whole" / f"seed-{seed}")


def test_more_seeds_may_be_added_and_nothing_left_to_do_is_no_error(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features)
    first = train(nested, tmp_path / "run", seeds=(0, 1), fast_path="stacked")
    more = train(nested, tmp_path / "run", seeds=range(4), fast_path="stacked", resume=True)
    assert more.metrics["top1"]["values"][:2] == first.metrics["top1"]["values"]
    assert len(more.metrics["top1"]["values"]) == 4
    again = train(nested, tmp_path / "run", seeds=range(4), resume=True)
    assert again.metrics == more.metrics
    assert again.summary["fast_path"] == "stacked"


def test_more_epochs_restart_stacked_seeds_and_resume_loop_seeds(features: Path, tmp_path: Path) -> None:
    for path in ("stacked", "off"):
        train(settings_of(features), tmp_path / path, seeds=(0, 1), fast_path=path)
        longer = settings_of(features, hp__epochs=5)
        result = train(longer, tmp_path / path, seeds=(0, 1), fast_path=path, resume=True)
        assert [row["epochs"] for row in result.summary["runs"]] == [5, 5]
        whole = train(longer, tmp_path / f"{path}-whole", seeds=(0, 1), fast_path=path)
        assert losses(tmp_path / path / "seed-1") == pytest.approx(losses(whole.folder / "seed-1"), abs=1e-12)


def test_a_stacked_seed_with_too_few_epochs_is_retrained_by_the_loop(features: Path, tmp_path: Path) -> None:
    train(settings_of(features), tmp_path / "run", seeds=(0, 1), fast_path="stacked")
    longer = settings_of(features, hp__epochs=4)
    result = train(longer, tmp_path / "run", seeds=(0, 1), fast_path="off", resume=True)
    assert [row["epochs"] for row in result.summary["runs"]] == [4, 4]
    assert len(losses(tmp_path / "run" / "seed-0")) == 4 * 7


def test_three_rows_are_enough(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "few.npz", features=numpy.eye(3, dtype="float32"), labels=[0, 1, 2])
    nested = settings_of(tmp_path / "few.npz", hp__effective_batch=16)
    result = train(nested, tmp_path / "run", fast_path="stacked")
    assert result.summary["effective_batch_size"] == 2
    assert any("more than the 2 training samples" in note for note in result.notes)


def test_a_folder_of_another_training_is_refused(features: Path, tmp_path: Path) -> None:
    nested = settings_of(features)
    train(nested, tmp_path / "run", seeds=(0, 1))
    with pytest.raises(RequestError, match="it holds a run"):
        train(nested, tmp_path / "run", seeds=(0, 1))
    with pytest.raises(RequestError, match=r"another hp\.learning_rate"):
        train(settings_of(features, hp__learning_rate=0.5), tmp_path / "run", seeds=(0, 1), resume=True)
    other = write_features(tmp_path / "other.npz", count=120, seed=7)
    (tmp_path / "moved.npz").write_bytes(Path(features).read_bytes())
    moved = settings_of(tmp_path / "moved.npz")
    train(moved, tmp_path / "moved", seeds=(0, 1))
    (tmp_path / "moved.npz").write_bytes(other.read_bytes())
    with pytest.raises(RequestError, match="another data"):
        train(moved, tmp_path / "moved", seeds=(0, 1), resume=True)
    with pytest.raises(RequestError, match="no run of several seeds"):
        train(nested, tmp_path / "nothing", resume=True)
    with pytest.raises(RequestError, match="holds a run of several seeds"):
        run_training(request_of(nested, resume=True), output=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": (1, 1)}, "give each once"),
        ({"seeds": (-1,)}, "from 0"),
        ({"learning_rates": (0.1, 0.1)}, "named twice"),
        ({"learning_rates": (0.0,)}, "above 0"),
        ({"seeds": (0,), "fast_path": "fast"}, "it must be one of auto, off, resident, stacked"),
        ({"fast_path": "stacked"}, "goes with seeds=N"),
    ],
)
def test_wrong_seeds_are_refused(options: dict[str, Any], words: str, features: Path) -> None:
    with pytest.raises(RequestError, match=words):
        request_of(settings_of(features), **options)


def test_fit_counts_seeds_from_the_file_s_own_and_refuses_none(features: Path, tmp_path: Path) -> None:
    result = brim.fit(settings_of(features, hp__seed=7), seeds=2, output=tmp_path / "run")
    assert result.summary["seeds"] == [7, 8]
    with pytest.raises(RequestError, match="give how many, from 1"):
        brim.fit(settings_of(features), seeds=0)
    with pytest.raises(RequestError, match="did you mean"):
        brim.fit(settings_of(features), fast_pathh="off")


def test_a_wrong_request_writes_nothing(features: Path, tmp_path: Path) -> None:
    for path in ("stacked", "off"):
        with pytest.raises(RequestError, match="did you mean top1"):
            train(settings_of(features, training__monitor="top3"), tmp_path / path, fast_path=path)
        assert not (tmp_path / path / "runs.json").exists()


def test_torchrun_is_refused(features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_run, "current_world", lambda: World(rank=0, size=2, local_rank=0))
    with pytest.raises(RequestError, match="without torchrun"):
        train(settings_of(features), tmp_path / "run")


def test_an_earlier_run_of_several_seeds_gives_its_sizes_to_another(features: Path, tmp_path: Path) -> None:
    train(settings_of(features), tmp_path / "first", seeds=(0, 1), fast_path="stacked")
    nested = settings_of(features)
    del nested["hp"]["effective_batch"]
    later = train(nested, tmp_path / "later", seeds=(0, 1), fast_path="stacked", plan=str(tmp_path / "first"))
    assert later.summary["effective_batch_size"] == 16
    assert later.summary["fast_path"] == "stacked"
