"""The benchmark of trainers, in its small size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks import made_trainers, trainers

ROW = {
    "trainer": "Trainer", "batch_size": 16, "accumulation": 4, "forecast_bytes": 101 * 2**30,
    "measured_bytes": 100 * 2**30, "rate": 49.0, "best_rate": 50.0, "steps": 6, "steps_asked": 6, "oom_events": 2,
    "largest_loss_difference": 1e-4, "largest_norm_difference": 2e-4, "rounding_loss_difference": 3e-4,
    "rounding_norm_difference": 4e-4, "peaks": {8: 50, 16: 100, 32: None}, "forecasts": {8: 51, 16: 99, 32: 200},
}  # fmt: skip


def test_the_table_says_what_was_measured() -> None:
    lines = trainers.table([ROW]).splitlines()
    assert lines[2] == (
        "| Trainer | 16 × 4 | 101.00 GiB | 100.00 GiB | +1.0% | +2.0% of 2 | 49.0 | 50.0 | 0.980 "
        "| 6 of 6 steps, 2 OOM | 1.0e-04 | 2.0e-04 | 3.0e-04, 4.0e-04 |"
    )
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


@pytest.mark.parametrize("library", ["trl", "peft"])
def test_a_row_says_which_library_is_missing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_trainers, "installed", lambda name: name != library)
    assert f"no {library.upper()} here" in made_trainers.described("SFTTrainer")


@pytest.mark.parametrize("missing", [("trl", "peft"), ()])
def test_what_stands_in_for_a_library_has_the_same_loss(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise
    if not missing:
        pytest.importorskip("trl")
    monkeypatch.setattr(made_trainers, "installed", lambda name: name not in missing)
    shape = dataclasses.replace(made_trainers.shape_of(tiny=True), steps=3)
    with made_trainers.trainer_of("SFTTrainer", shape, 4) as trainer:
        found = trainers.timed_run(trainer, shape)
    with made_trainers.trainer_of("Trainer", shape, 8) as trainer:
        expected = trainers.timed_run(trainer, shape)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def test_adapters_by_hand_run_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_trainers, "installed", lambda name: False)
    shape = dataclasses.replace(made_trainers.shape_of(tiny=True), dtype=torch.bfloat16, steps=3)
    with made_trainers.trainer_of("SFTTrainer", shape, 8) as trainer:
        assert len(trainers.timed_run(trainer, shape)["losses"]) == 3


def test_a_part_that_fails_is_in_the_row_and_the_file(tmp_path: Path) -> None:
    shape = dataclasses.replace(made_trainers.shape_of(tiny=True), memory_limit=2**10)
    measurement, saved = trainers.Measurement("Trainer", shape, None), []
    trainers.measure(measurement, seconds=600, save=lambda: saved.append(dict(measurement.row)))
    assert "DoesNotFitError" in saved[0]["errors"]["fitted"]
    assert "DoesNotFitError" in trainers.table([measurement.row])


def test_no_part_begins_after_the_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    trainers.main(["--tiny", "--deadline", "0", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["not_started"] for row in rows] == [["fitted"], ["fitted"]]
    assert "not started within --deadline: fitted" in capsys.readouterr().out


@pytest.mark.slow  # half a minute: every size of two trainers
@pytest.mark.parametrize("missing", [("trl", "peft"), ()])
def test_the_whole_benchmark_runs_on_the_cpu(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(made_trainers, "installed", lambda name: name not in missing)
    trainers.main(["--tiny", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["steps"] for row in rows] == [6, 6]
    assert all(row["oom_events"] >= 1 and row["largest_loss_difference"] < 1e-4 for row in rows)
    assert all(row["largest_norm_difference"] < 1e-3 for row in rows)
    assert all(len(row["rates"]) == 2 and row["rate"] == max(row["rates"]) for row in rows)
    assert all(set(row["fixed_rates"]) <= set(row["forecasts"]) == {"1", "2", "4", "8"} for row in rows)
