"""A sweep without processes: order, results, retries, resuming, and what is left in the folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import AttemptOutcome, Job, write_outcome
from brim.sweeps.run import next_attempt
from tests.sweeps.sweep_runs import Watcher, done, failed, journal_of, run_fake, sweep_of

PAIRED = {"model.type": ["r3d_18", "mc3_18", "s3d"], "hp.batch_size": [128, 64, 32]}


def by_model(job: Job) -> AttemptOutcome:
    scores = {"r3d_18": 0.5, "mc3_18": 0.9, "s3d": 0.7}
    return done(job, top1=scores[job.settings["model"]["type"]], samples_per_second=10.0, batch_size_used=8)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_experiment_runs_once_in_order_with_its_batch_size(tmp_path: Path) -> None:
    result, launcher = run_fake(sweep_of(PAIRED), tmp_path / "out", by_model)
    assert [(job.settings["model"]["type"], job.batch_size) for job in launcher.jobs] == [
        ("r3d_18", 128),
        ("mc3_18", 64),
        ("s3d", 32),
    ]
    assert [job.run_settings["hp"]["effective_batch"] for job in launcher.jobs] == [128, 64, 32]
    assert result.document["state"] == "completed"
    assert [one.experiment.flat["model.type"] for one in result.best] == ["mc3_18", "s3d", "r3d_18"]


def test_the_tables_have_a_row_for_each_experiment_and_each_epoch(tmp_path: Path) -> None:
    run_fake(sweep_of(PAIRED), tmp_path / "out", by_model, results_file=str(tmp_path / "mine.csv"))
    rows = table(tmp_path / "out" / "results.csv")
    assert [row["model.type"] for row in rows] == ["r3d_18", "mc3_18", "s3d"]
    first = rows[0]
    assert (first["hp.batch_size"], first["best_top1"], first["final_top1"]) == ("128", "0.5", "0.25")
    assert (first["state"], first["seconds"], first["batch_size_reason"]) == ("completed", "2.0", "as asked")
    assert table(tmp_path / "mine.csv") == rows
    details = table(tmp_path / "out" / "details.csv")
    assert [(row["id"], row["epoch"]) for row in details[:2]] == [(first["id"], "0"), (first["id"], "1")]
    assert len(details) == 6


def test_the_document_counts_what_pairing_saved(tmp_path: Path) -> None:
    result, _ = run_fake(sweep_of(PAIRED), tmp_path / "out", by_model)
    document = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert document == result.document
    assert document["schema"] == "brim.sweep/1"
    assert document["pairing"]["mode"] == "zip"
    saved = document["time_saved"]
    assert (saved["experiments"], saved["experiments_full_product"]) == (3, 9)
    assert saved["fraction"] == pytest.approx(2 / 3)
    assert saved["seconds_saved_estimate"] == pytest.approx(12.0)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["kind"] == "sweep"


def test_a_failure_is_one_experiments_own(tmp_path: Path) -> None:
    def play(job: Job) -> AttemptOutcome:
        return failed(job) if job.settings["model"]["type"] == "mc3_18" else by_model(job)

    result, _ = run_fake(sweep_of(PAIRED), tmp_path / "out", play)
    assert result.document["counts"] == {"completed": 2, "failed": 1, "interrupted": 0, "waiting": 0}
    assert result.document["state"] == "failed"
    assert [one.experiment.flat["model.type"] for one in result.failed] == ["mc3_18"]
    assert table(tmp_path / "out" / "results.csv")[1]["error"] == "ValueError: no", "one line in the table"


def test_a_size_forecast_not_to_fit_is_lowered_at_once(tmp_path: Path) -> None:
    sweep = sweep_of({"model.type": ["r3d_18"], "hp.batch_size": [128]})
    name = sweep.expand().experiments[0].id
    forecasts = {name: SizeForecast(batch_size=128, fits=False, batch_size_max=72)}
    _, launcher = run_fake(sweep, tmp_path / "out", done, forecasts=forecasts)
    (job,) = launcher.jobs
    assert job.run_settings["hp"] == {"batch_size": 72, "effective_batch": 128, "base_batch": 128}
    assert job.batch_size == 128, "what was asked for is known"
    _, launcher = run_fake(sweep, tmp_path / "exact", done, forecasts=forecasts, retry=False)
    assert launcher.jobs[0].run_settings["hp"]["batch_size"] == 128, "without retries: exactly as asked"


def test_an_oom_is_retried_at_the_planned_smaller_size(tmp_path: Path) -> None:
    sweep = sweep_of({"model.type": ["r3d_18"], "hp.batch_size": [128]})
    name = sweep.expand().experiments[0].id
    forecast = SizeForecast(batch_size=128, device_bytes=100, limit_bytes=160, fits=True, batch_size_max=72)

    def play(job: Job) -> AttemptOutcome:
        return done(job) if job.run_settings["hp"]["batch_size"] <= 72 else failed(job, "out_of_memory", "CUDA OOM")

    watcher = Watcher()
    result, launcher = run_fake(sweep, tmp_path / "out", play, forecasts={name: forecast}, listener=watcher)
    first, second = launcher.jobs
    assert (second.run_settings["hp"]["batch_size"], second.run_settings["hp"]["effective_batch"]) == (72, 128)
    assert second.alone
    assert not first.alone
    assert second.changed_because == "128 ran out of memory: retried at 72 (forecast to fit)"
    assert watcher.ends == [(name, "failed", True), (name, "completed", False)]
    assert result.document["counts"]["completed"] == 1
    assert result.results[0].attempts == 2


def test_no_retry_fails_it_instead(tmp_path: Path) -> None:
    sweep = sweep_of({"model.type": ["r3d_18"], "hp.batch_size": [128]})
    result, launcher = run_fake(sweep, tmp_path / "out", lambda job: failed(job, "out_of_memory"), retry=False)
    assert len(launcher.jobs) == 1
    assert launcher.jobs[0].fail_on_oom
    assert len(result.failed) == 1


def test_a_folder_that_holds_a_sweep_is_not_written_over(tmp_path: Path) -> None:
    run_fake(sweep_of(PAIRED), tmp_path / "out", by_model)
    with pytest.raises(RequestError, match="it holds a sweep; continue it with resume="):
        run_fake(sweep_of(PAIRED), tmp_path / "out", by_model)
    with pytest.raises(RequestError, match="there is no sweep in"):
        run_fake(sweep_of(PAIRED), tmp_path / "other", by_model, resume=True)


def test_resuming_runs_what_failed_and_nothing_that_is_done(tmp_path: Path) -> None:
    def flaky(job: Job) -> AttemptOutcome:
        return failed(job) if job.settings["model"]["type"] == "s3d" else by_model(job)

    run_fake(sweep_of(PAIRED), tmp_path / "out", flaky)
    watcher = Watcher()
    result, launcher = run_fake(sweep_of(PAIRED), tmp_path / "out", by_model, listener=watcher, resume=True)
    assert [job.settings["model"]["type"] for job in launcher.jobs] == ["s3d"]
    assert launcher.jobs[0].attempt == 2
    assert watcher.counts == (3, 2)
    assert result.document["counts"]["completed"] == 3
    assert [one.metric("top1") for one in result.results] == [0.5, 0.9, 0.7], "earlier results are there"


def test_an_edited_file_never_mixes_runs(tmp_path: Path) -> None:
    run_fake(sweep_of(PAIRED), tmp_path / "out", by_model)
    changed = {**PAIRED, "hp.batch_size": [128, 64, 16]}
    watcher = Watcher()
    _, launcher = run_fake(sweep_of(changed), tmp_path / "out", by_model, listener=watcher, resume=True)
    assert [job.batch_size for job in launcher.jobs] == [16]
    assert any("1 experiment of this folder no longer in the file" in note for note in watcher.notes)


def test_results_of_a_child_that_outlived_the_sweep_are_kept(tmp_path: Path) -> None:
    def interrupt(job: Job) -> AttemptOutcome:
        write_outcome(Path(job.folder), by_model(job))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fake(sweep_of(PAIRED), tmp_path / "out", interrupt)
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["state"] == "interrupted"
    _, launcher = run_fake(sweep_of(PAIRED), tmp_path / "out", by_model, resume=True)
    assert [job.settings["model"]["type"] for job in launcher.jobs] == ["mc3_18", "s3d"]
    ends = [entry for entry in journal_of(tmp_path / "out") if entry["event"] == "ended"]
    assert len(ends) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on": "moon"}, "on='moon'"),
        ({"jobs_per_gpu": 0}, "jobs_per_gpu=0"),
        ({"timeout_seconds": 0.0}, "timeout=0"),
        ({"data_percentage": 120.0}, "data_percentage=120"),
        ({"loggers": ("tensorbord",)}, "did you mean tensorboard"),
        ({"slurm": {"partition": "gpu"}}, "slurm=: it goes with on='slurm'"),
    ],
)
def test_a_request_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    from brim.settings.sweep_request import SweepRequest

    with pytest.raises(RequestError, match=words):
        SweepRequest(**settings)


def job(size: int | str = 64, **more: object) -> Job:
    return Job(id="x", settings={"model": {"type": "m"}, "hp": {"batch_size": size}}, folder="f", **more)  # type: ignore[arg-type]


def test_without_a_forecast_half_and_then_a_quarter_are_tried() -> None:
    first = job()
    second = next_attempt(first, failed(first, "out_of_memory"), planned=None, effective_batch=64)
    assert second is not None
    third = next_attempt(second, failed(second, "out_of_memory"), planned=None, effective_batch=64)
    assert third is not None
    sizes = [one.run_settings["hp"]["batch_size"] for one in (second, third)]
    assert sizes == [32, 16]
    kept = third.run_settings["hp"]
    assert (kept["effective_batch"], kept["base_batch"]) == (64, 64), "what is learnt stays the same"
    assert next_attempt(third, failed(third, "out_of_memory"), planned=None, effective_batch=64) is None


def test_a_forecast_size_that_is_no_smaller_is_not_believed() -> None:
    again = next_attempt(job(), failed(job(), "out_of_memory"), planned=90, effective_batch=None)
    assert again is not None
    assert again.run_settings["hp"]["batch_size"] == 32


def test_auto_is_planned_again_with_more_memory_kept_free() -> None:
    first = job("auto")
    again = next_attempt(first, failed(first, "out_of_memory"), planned=9, effective_batch=48)
    assert again is not None
    assert again.run_settings["hp"] == {"batch_size": "auto"}
    assert again.run_settings["training"] == {"margin": 0.25}
    assert again.alone


@pytest.mark.parametrize("failure", ["error", "request", "timeout", "killed"])
def test_other_failures_stay_failures(failure: str) -> None:
    assert next_attempt(job(), failed(job(), failure), planned=8, effective_batch=64) is None


def test_a_lost_device_is_tried_again_as_it_was() -> None:
    again = next_attempt(job(), failed(job(), "lost"), planned=8, effective_batch=64)
    assert again is not None
    assert (again.attempt, again.run_settings) == (2, job().run_settings)


def test_one_sample_that_does_not_fit_and_what_is_done_are_not_tried_again() -> None:
    assert next_attempt(job(1), failed(job(1), "out_of_memory"), planned=0, effective_batch=1) is None
    completed = AttemptOutcome(id="x", attempt=1, state="completed")
    assert next_attempt(job(), completed, planned=8, effective_batch=64) is None
    assert next_attempt(job(), failed(job(), "out_of_memory"), planned=8, effective_batch=64, retry=False) is None
