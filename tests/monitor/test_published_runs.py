"""What each kind of run publishes: the documents after every update, and nothing left at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.evaluation.worker import EvalListener
from brim.monitor.live import LiveRun, read_runs
from brim.settings.molecule_settings import OodCommand, OodRequest
from brim.sweeps.live_figures import LiveSweep
from tests.evaluation import evaluation_runs
from tests.molecules.molecule_files import features_of
from tests.monitor.sampling import wait_until
from tests.profiling import profile_runs
from tests.sweeps import sweep_runs
from tests.training import training_runs

Documents = list[dict[str, Any]]


def progress(documents: Documents) -> list[tuple[int, int, str]]:
    """The steps of what was published, without repetitions."""
    steps = [(one["done"], one["total"], one["unit"]) for one in documents if one["done"] is not None]
    return list(dict.fromkeys(steps))


def evaluate(folder: Path, **settings: Any) -> None:
    data = evaluation_runs.write_words(folder / "words.jsonl", 20)
    evaluation_runs.run(evaluation_runs.shout(folder), data, folder / "run", metrics="exact_match", **settings)


def test_an_evaluation_publishes_its_samples_its_size_and_its_accuracy(tmp_path: Path, published: Documents) -> None:
    evaluate(tmp_path, batch_size=8)
    assert progress(published)[0] == (0, 20, "samples")
    assert progress(published)[-1] == (20, 20, "samples")
    last = published[-1]
    assert (last["kind"], last["state"], last["device"], last["ranks"]) == ("eval", "running", "cpu", 1)
    assert last["metric"] == {"name": "exact_match", "value": pytest.approx(16 / 20)}
    assert (last["batch_size_found"], last["oom_events"]) == ("given", 0)
    assert last["batch_size"] <= 8
    assert last["samples_per_second"] > 0
    assert 0 <= last["waiting_fraction"] <= 1
    assert not (tmp_path / "run" / "live.json").exists()
    assert read_runs() == []


def test_a_size_that_is_looked_for_is_published_as_such(tmp_path: Path, published: Documents) -> None:
    evaluate(tmp_path)
    assert {one["batch_size_found"] for one in published} - {None} <= {"searching", "found on this run"}


def test_the_size_of_an_earlier_run_is_published_as_a_cached_plan(tmp_path: Path, published: Documents) -> None:
    class Found:
        settled = True

    from brim.evaluation.start import Start

    plan: Any = object()
    sizer: Any = Found()
    assert Start(sizer=sizer, cached=plan).size_found == "from a cached plan"
    assert Start(sizer=sizer).size_found == "found on this run"
    assert Start(sizer=sizer, given=True).size_found == "given"


def test_what_others_see_of_an_evaluation_under_way(tmp_path: Path) -> None:
    seen: Documents = []

    class Looks(EvalListener):
        def started(self, total: int, done: int) -> None:
            wait_until(lambda: any(run["total"] == total for run in read_runs()))
            seen.extend(read_runs())

    from brim.evaluation.run import evaluate as run_evaluation
    from brim.settings.eval_settings import EvalRequest

    data = evaluation_runs.write_words(tmp_path / "words.jsonl", 20)
    request = EvalRequest(
        model=evaluation_runs.shout(tmp_path), data=str(data), device="cpu", use_cache=False, metrics=("exact_match",)
    )
    run_evaluation(request, output=tmp_path / "run", listener=Looks())
    (run,) = seen
    assert (run["folder"], run["state"], run["done"], run["total"]) == (str(tmp_path / "run"), "running", 0, 20)
    assert read_runs() == []


def test_an_evaluation_that_fails_leaves_no_file(tmp_path: Path) -> None:
    data = evaluation_runs.write_words(tmp_path / "words.jsonl", 2)
    with pytest.raises(Exception, match="absent"):
        evaluation_runs.run(f"py:{tmp_path / 'absent.py'}:f", data, tmp_path / "run")
    assert read_runs() == []
    assert not (tmp_path / "run" / "live.json").exists()


def test_a_profile_publishes_its_points_and_the_evaluation_under_way(tmp_path: Path, published: Documents) -> None:
    profile_runs.run(tmp_path, latency_samples=0)
    assert progress(published) == [(done, 3, "points") for done in range(4)]
    inside = [one for one in published if one["part"] is not None]
    assert {one["part"]["unit"] for one in inside} == {"samples"}
    assert {one["label"] for one in inside} == {"reach=2", "reach=4", "reach=6"}
    assert inside[-1]["part"] == {"done": 8, "total": 8, "unit": "samples"}
    assert inside[-1]["metric"]["value"] == pytest.approx(0.75)
    assert {one["kind"] for one in published} == {"profile"}
    assert list(tmp_path.rglob("live.json")) == []


def test_a_training_publishes_samples_loss_and_its_validation(tmp_path: Path, published: Documents) -> None:
    data = training_runs.write_features(tmp_path / "features.npz")
    training_runs.run(training_runs.settings_of(data), tmp_path / "run")
    last = published[-1]
    assert (last["kind"], last["unit"], last["device"]) == ("train", "samples", "cpu")
    assert last["done"] == last["total"] > 0
    assert last["loss"] == pytest.approx(training_runs.losses(tmp_path / "run")[-1])
    assert last["metric"]["name"].startswith("val_")
    assert last["batch_size"] <= 16
    assert last["batch_size_found"] in ("searching", "found on this run")
    assert "validating" in {one["state"] for one in published}
    assert list(tmp_path.rglob("live.json")) == []


def test_several_seeds_are_one_training(tmp_path: Path, published: Documents) -> None:
    from brim.training.seeds.run import run_seeds

    data = training_runs.write_features(tmp_path / "features.npz")
    request = training_runs.request_of(training_runs.settings_of(data, hp__epochs=1), seeds=(0, 1), fast_path="off")
    run_seeds(request, output=tmp_path / "run")
    outer = [one for one in published if one["folder"] == str(tmp_path / "run")]
    assert outer[-1]["label"] == "2/2 runs done"
    assert outer[-1]["done"] == outer[-1]["total"]
    assert outer[-1]["loss"] is not None


def test_stacked_seeds_publish_their_epochs(tmp_path: Path, published: Documents) -> None:
    from brim.training.seeds.run import run_seeds

    data = training_runs.write_features(tmp_path / "features.npz")
    request = training_runs.request_of(training_runs.settings_of(data), seeds=(0, 1), fast_path="stacked")
    run_seeds(request, output=tmp_path / "run")
    assert (3, 3, "epochs") in progress(published)


def test_a_sweep_publishes_its_experiments(tmp_path: Path) -> None:
    failures = {"left": 1}

    def play(job: Any) -> Any:
        failures["left"] -= 1
        return sweep_runs.failed(job, "out_of_memory") if failures["left"] == 0 else sweep_runs.done(job)

    with LiveRun(tmp_path, "sweep", publishes=False) as live:
        grid = sweep_runs.sweep_of({"model": {"type": ["r3d_18"]}, "hp": {"batch_size": [4, 8]}})
        sweep_runs.run_fake(grid, tmp_path / "out", play, listener=LiveSweep(live))
        document = json.loads(json.dumps(live.document))
    assert (document["done"], document["total"], document["unit"]) == (2, 2, "experiments")
    assert document["oom_events"] == 1


def test_a_run_of_molecules_publishes_its_cells(tmp_path: Path, published: Documents) -> None:
    from brim.molecules.run import ood

    inner = features_of(tmp_path / "in.safetensors", 60, shift=0.0)
    outer = features_of(tmp_path / "out.safetensors", 50, shift=1.5, seed=1)
    request = OodRequest(id=str(inner), ood=str(outer), seeds=(0, 1), epochs=3, hidden=(8,), device="cpu", lrs=(1e-2,))
    result = ood(OodCommand(request=request, output=tmp_path / "run"))
    steps = progress(published)
    assert steps[0] == (0, len(result.cells), "cells")
    assert steps[-1] == (len(result.cells), len(result.cells), "cells")
    assert {"done": 3, "total": 3, "unit": "epochs"} in [one["part"] for one in published]
    assert list(tmp_path.rglob("live.json")) == []
