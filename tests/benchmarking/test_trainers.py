"""The benchmark of trainers, in its small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks import trainers

ROW = {
    "trainer": "Trainer", "batch_size": 16, "accumulation": 4, "forecast_bytes": 101 * 2**30,
    "measured_bytes": 100 * 2**30, "rate": 49.0, "best_rate": 50.0, "steps": 6, "steps_asked": 6, "oom_events": 2,
    "largest_loss_difference": 1e-4,
}  # fmt: skip


def test_the_table_says_what_was_measured() -> None:
    lines = trainers.table([ROW]).splitlines()
    assert lines[2] == (
        "| Trainer | 16 × 4 | 101.00 GiB | 100.00 GiB | +1.0% | 49.0 | 50.0 | 0.980 | 6 of 6 steps, 2 OOM | 1.0e-04 |"
    )
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


@pytest.mark.parametrize("library", ["trl", "peft"])
def test_a_row_says_which_library_is_missing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "installed", lambda name: name != library)
    assert f"no {library.upper()} here" in trainers.described("SFTTrainer")


@pytest.mark.parametrize("missing", [("trl", "peft"), ()])
def test_what_stands_in_for_a_library_has_the_same_loss(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports its use to its makers otherwise
    if not missing:
        pytest.importorskip("trl")
    monkeypatch.setattr(trainers, "installed", lambda name: name not in missing)
    shape = trainers.shape_of(tiny=True)
    with trainers.trainer_of("SFTTrainer", shape, 4, 3) as trainer:
        found = trainers.timed_run(trainer, shape)
    with trainers.trainer_of("Trainer", shape, 8, 3) as trainer:
        expected = trainers.timed_run(trainer, shape)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


@pytest.mark.slow  # half a minute: every size of two trainers
def test_the_whole_benchmark_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    trainers.main(["--tiny", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["steps"] for row in rows] == [6, 6]
    assert all(row["oom_events"] >= 1 and row["largest_loss_difference"] < 1e-4 for row in rows)
