"""`--log` of eval, profile, train and sweep: which figures each sends, and that nothing else changes."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import RequestError
from brim.evaluation import live_figures as evaluation_figures
from brim.settings.declare import read_settings
from brim.settings.eval_settings import EvaluateSettings
from brim.sweeps.job import Job
from brim.training.listener import StepRecord
from brim.training.live_figures import MOST_POINTS, LoggedTraining
from tests.evaluation.evaluation_runs import record_of, run, shout, write_words
from tests.monitor.fake_loggers import FakeWandb, FakeWandbRun, StoredRun
from tests.profiling.profile_runs import model, write_questions
from tests.sweeps.sweep_runs import done, failed
from tests.training.training_runs import StopsAt, request_of, settings_of, write_features


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, StoredRun]:
    """The runs that the logger wandb has stored."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(evaluation_figures, "SECONDS_BETWEEN_POINTS", 0.0)
    return fake.runs


def steps(run: StoredRun, name: str) -> list[int]:
    return [step for step, _ in run.curves[name]]


def test_an_evaluation_logs_its_progress_and_its_metrics(stored: Mapping[str, StoredRun], tmp_path: Path) -> None:
    words, output = write_words(tmp_path / "words.jsonl"), tmp_path / "run"
    result = run(shout(tmp_path), words, output, batch_size=5, no_auto_batch_size=True, log="wandb")
    logged = stored["run"]
    assert logged.state == "completed"
    assert logged.parameters["batch_size"] == "5"
    assert steps(logged, "exact_match_so_far") == [5, 10, 15, 20]
    assert logged.curves["exact_match_so_far"][-1][1] == pytest.approx(result.metrics["exact_match"]["value"])
    assert {value for _, value in logged.curves["batch_size"]} == {5.0}
    assert len(logged.curves["samples_per_second"]) == 4
    assert logged.summary["summary.metrics.exact_match.value"] == result.metrics["exact_match"]["value"]


def test_at_most_one_point_of_an_evaluation_a_second(
    stored: Mapping[str, StoredRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.3
        return now[0]

    monkeypatch.setattr(evaluation_figures, "SECONDS_BETWEEN_POINTS", 1.0)
    monkeypatch.setattr(evaluation_figures, "time", types.SimpleNamespace(monotonic=clock))
    run(shout(tmp_path), write_words(tmp_path / "words.jsonl", 60), tmp_path / "run", batch_size=1,
        no_auto_batch_size=True, num_workers=0, log="wandb")  # fmt: skip
    assert 0 < len(stored["run"].curves["batch_size"]) <= 60 * 0.3


def test_what_is_logged_where_enters_neither_request_nor_fingerprint(
    stored: Mapping[str, StoredRun], tmp_path: Path
) -> None:
    words, name = write_words(tmp_path / "words.jsonl"), shout(tmp_path)
    run(name, words, tmp_path / "logged", log=["wandb"])
    run(name, words, tmp_path / "plain")
    one, other = record_of(tmp_path / "logged"), record_of(tmp_path / "plain")
    assert one["request"].keys() == other["request"].keys()
    assert one["summary"]["fingerprint"] == other["summary"]["fingerprint"]
    assert stored.keys() == {"logged"}


def profile_three_points(folder: Path) -> None:
    brim.profile(
        model(folder), write_questions(folder), {"reach": [2, 4, 6]}, metrics="exact_match", device="cpu",
        no_cache=True, latency_samples=0, output=folder / "run", log="wandb",
    )  # fmt: skip


def test_a_profile_logs_a_step_for_each_point(stored: Mapping[str, StoredRun], tmp_path: Path) -> None:
    profile_three_points(tmp_path)
    logged = stored["run"]
    assert logged.state == "completed"
    assert logged.curves["accuracy"] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert logged.curves["knob/reach"] == [(0, 2.0), (1, 4.0), (2, 6.0)]
    assert steps(logged, "samples_per_second") == [0, 1, 2]


def test_a_training_logs_steps_and_epochs(stored: Mapping[str, StoredRun], tmp_path: Path) -> None:
    features = write_features(tmp_path / "features.npz")
    result = brim.train(settings_of(features), output=tmp_path / "run", no_cache=True, log="wandb")
    logged, total = stored["run"], result.summary["steps"]
    for name in ("loss", "learning_rate", "samples_per_second", "micro_batch", "oom_events"):
        assert steps(logged, name) == list(range(1, total + 1)), name
    per_epoch = total // 3
    assert steps(logged, "epoch/train_loss") == [per_epoch, 2 * per_epoch, total]
    assert len(logged.curves["epoch/val_top1"]) == 3
    assert logged.parameters["settings.hp.epochs"] == "3"
    assert logged.summary["summary.metrics.top1.mean"] == result.metrics["top1"]["mean"]
    assert "log" not in json.loads((tmp_path / "run" / "run.json").read_text())["request"]


def test_an_interrupted_training_is_logged_as_such(stored: Mapping[str, StoredRun], tmp_path: Path) -> None:
    from brim.training.run import run_training

    request = request_of(settings_of(write_features(tmp_path / "features.npz")))
    with pytest.raises(KeyboardInterrupt):
        run_training(request, output=tmp_path / "run", listener=StopsAt(3), log=["wandb"])
    assert stored["run"].state == "interrupted"
    assert steps(stored["run"], "loss")[:3] == [1, 2, 3]


@pytest.mark.parametrize("path", ["stacked", "off"])
def test_each_of_several_seeds_is_a_run_beside_the_whole(
    path: str, stored: Mapping[str, StoredRun], tmp_path: Path
) -> None:
    features = write_features(tmp_path / "features.npz")
    brim.train(settings_of(features), output=tmp_path / "run", seeds=2, fast_path=path, no_cache=True, log="wandb")
    assert stored.keys() == {"run", "seed-0", "seed-1"}
    assert {run.state for run in stored.values()} == {"completed"}
    for seed in ("seed-0", "seed-1"):
        assert len(stored[seed].curves["epoch/train_loss"]) == 3
        assert len(stored[seed].curves["loss"]) > 3
        assert stored[seed].parameters["settings.hp.seed"] == seed[-1]
    assert "summary.metrics.top1.deviation" in stored["run"].summary


class Points:
    """Takes the place of a run that is logged."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        del figures
        self.steps.append(step)


def test_a_long_training_is_thinned_to_about_a_thousand_points() -> None:
    points = Points()
    logged = LoggedTraining(points)  # type: ignore[arg-type]
    logged.started(25_000 * 16, 0)
    line = {"epoch": 0, "loss": 1.0, "learning_rate": 0.1, "effective_batch": 16, "micro_batches": (8, 8)}
    for step in range(1, 25_001):
        logged.step(StepRecord(**line, seconds=0.1, step=step, samples=16 * step))
    assert 0.9 * MOST_POINTS <= len(points.steps) <= MOST_POINTS
    assert points.steps[0] == 1
    assert points.steps[-1] > 24_900


def test_an_experiment_of_a_sweep_is_logged_with_its_epochs_and_its_failure(
    stored: Mapping[str, StoredRun], tmp_path: Path
) -> None:
    from brim.monitor.loggers.loggers import open_loggers
    from brim.sweeps.run import log_experiment

    one = Job(id="r3d_18-b8", settings={"model": {"type": "r3d_18"}, "hp": {"batch_size": 8}}, folder="f")
    other = Job(id="s3d", settings={}, folder="g")
    with open_loggers(["wandb"], tmp_path, print) as loggers:
        log_experiment(loggers, one, done(one))
        log_experiment(loggers, other, failed(other))
    assert stored["r3d_18-b8"].curves["train_loss"] == [(0, 1.0), (1, 0.5)]
    assert stored["r3d_18-b8"].parameters == {"model.type": "r3d_18", "hp.batch_size": "8"}
    assert (stored["s3d"].state, stored["s3d"].summary["failure"]) == ("failed", "error")


@pytest.mark.parametrize("command", ["evaluate", "profile", "train"])
def test_a_missing_library_is_an_error_before_anything_is_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    arguments: dict[str, tuple[Any, ...]] = {
        "evaluate": ("no-model", "no-data"),
        "profile": ("no-model", "no-data", "reach"),
        "train": (settings_of(tmp_path / "missing.npz"),),
    }
    with pytest.raises(RequestError, match=r"log='mlflow'.*brim\[mlflow\]"):
        getattr(brim, command)(*arguments[command], output=tmp_path / "run", log="mlflow")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", ["init", "log", "finish"])  # finish: when the record is written already
@pytest.mark.parametrize("command", ["evaluate", "profile", "train", "seeds"])
@pytest.mark.usefixtures("stored")
def test_a_server_that_fails_ends_no_run_and_is_noted_once_in_its_record(
    command: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(FakeWandb if at == "init" else FakeWandbRun, at, fail)
    output = tmp_path / "run"
    if command == "evaluate":
        run(shout(tmp_path), write_words(tmp_path / "words.jsonl"), output, log="wandb")
    elif command == "profile":
        profile_three_points(tmp_path)
    else:
        settings = settings_of(write_features(tmp_path / "features.npz"))
        brim.train(settings, output=output, seeds=2 if command == "seeds" else None, no_cache=True, log="wandb")
    notes = [note for note in record_of(output)["summary"]["notes"] if "wandb" in note]
    assert notes == ["log='wandb': ConnectionError: no route; nothing more is logged there"]


def test_a_name_that_is_no_logger_and_a_comparison_are_refused() -> None:
    given = {"model": "m", "data": "d"}
    with pytest.raises(RequestError, match="did you mean wandb"):
        read_settings(EvaluateSettings, {**given, "log": ["wndb"]})
    with pytest.raises(RequestError, match=r"log='wandb'.*compare_batch"):
        read_settings(EvaluateSettings, {**given, "log": ["wandb"], "compare_batch": [1, 2]})
