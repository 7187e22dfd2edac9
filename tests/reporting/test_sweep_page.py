"""The page of a sweep: best first, score against cost, sizes given and used, failures with their reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.reporting.base import Page, Section
from brim.reporting.kinds.sweep import against_rows
from brim.reporting.write import page_of, write_report
from brim.settings.config_files import read_sweep
from brim.settings.sweep_request import SweepRequest
from brim.sweeps.forecasts import SizeForecast
from brim.sweeps.job import AttemptOutcome, Job
from brim.sweeps.run import SweepPlan, run_sweep

GRID = {
    "model.type": ["r3d_18", "mc3_18", "s3d"],
    "hp.batch_size": [128, 64, 32],
    "hp.learning_rate": [0.1, 0.01],
}


class Played:
    """A launcher that makes up how experiments end."""

    def run(self, jobs: Any, recorder: Any) -> None:
        for place, job in enumerate(jobs):
            recorder.started(job, "cuda:0")
            recorder.ended(job, self.outcome(job, place))

    def outcome(self, job: Job, place: int) -> AttemptOutcome:
        if place == 1:
            return AttemptOutcome(
                id=job.id, attempt=1, state="failed", failure="error", error="ValueError: <b>no</b>\nmore"
            )
        used = 72 if place == 0 else job.batch_size
        figures = {
            "best": {"top1": 0.5 + place / 20}, "final": {"top1": 0.5}, "epochs": 3, "samples_per_second": 100.0,
            "batch_size_used": used, "peak_reserved_bytes": (place + 1) << 30, "oom_events": 1,
        }  # fmt: skip
        why = "128 did not fit" if place == 0 else "as asked"
        return AttemptOutcome(
            id=job.id, attempt=1, state="completed", seconds=10.0 * place, batch_size_reason=why, figures=figures
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    expansion = read_sweep(GRID).expand()
    forecast = SizeForecast(batch_size=128, peak_reserved_bytes=5 << 30, fits=False, batch_size_max=72)
    plan = SweepPlan(expansion=expansion, forecasts={expansion.experiments[0].id: forecast})
    run_sweep(plan, SweepRequest(file="grid.yaml"), Played(), output=tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def page(folder: Path) -> Page:
    return page_of(open_run(folder))


def section(page: Page, title: str) -> Section:
    return next(one for one in page.sections if one.title == title)


def test_the_best_experiment_is_the_headline_and_first_in_the_table(page: Page) -> None:
    assert page.headline == "Best: s3d at batch size 32, top1 0.750"
    table = section(page, "Experiments").table
    assert table is not None
    assert [row["model"] for row in table.rows][:3] == ["s3d", "s3d", "mc3_18"]
    assert [column.title for column in table.columns][2] == "hp.learning_rate", "what differs has a column"


def test_the_score_is_drawn_against_time_and_memory(page: Page) -> None:
    found = section(page, "Score against time and memory")
    assert [chart.title for chart in found.charts] == ["top1 against duration (s)", "top1 against peak reserved (GiB)"]


def test_given_forecast_and_used_sizes_are_shown_together(page: Page) -> None:
    table = section(page, "Batch sizes").table
    assert table is not None
    row = next(row for row in table.rows if row["batch_size_reason"] == "128 did not fit")
    assert (row["asked"], row["planned"], row["batch_size_used"]) == (128, 128, 72)


def test_sizes_that_nobody_gave_are_not_called_given(folder: Path) -> None:
    document = json.loads((folder / "sweep.json").read_text())
    for entry in document["experiments"]:
        entry["settings"]["hp"]["batch_size"] = "auto"
    (folder / "sweep.json").write_text(json.dumps(document))
    chart = section(page_of(open_run(folder)), "Batch sizes").charts[0]
    assert chart.caption == "Batch sizes of 6: none was given, each was found."


def test_savings_of_pairing_and_failures_are_reported(page: Page) -> None:
    assert "6 experiments instead of the 18" in section(page, "How experiments were paired").paragraphs[1]
    failures = section(page, "Failures").table
    assert failures is not None
    assert [row["failure"] for row in failures.rows] == ["error"]
    assert len(page.warnings) == 1


def test_the_page_is_written_with_everything_escaped(folder: Path) -> None:
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<b>no</b>" not in text
    assert "&lt;b&gt;no&lt;/b&gt;" in text


def test_a_sweep_without_results_or_document_has_a_page(folder: Path) -> None:
    document = json.loads((folder / "sweep.json").read_text())
    for entry in document["experiments"]:
        entry["result"] = {"state": "waiting"}
    (folder / "sweep.json").write_text(json.dumps({**document, "metric": None, "ranking": [], "state": "interrupted"}))
    page = page_of(open_run(folder))
    assert page.headline == "No experiment has a result"
    assert any("--resume" in line for line in page.warnings)
    (folder / "sweep.json").unlink()
    assert page_of(open_run(folder)).title


def test_only_what_nothing_of_the_same_model_beats_is_on_the_front() -> None:
    rows = [
        {"id": "a", "model": "m", "score": 0.5, "seconds": 1.0},
        {"id": "b", "model": "m", "score": 0.4, "seconds": 2.0},
        {"id": "c", "model": "n", "score": 0.1, "seconds": 3.0},
        {"id": "d", "model": "n", "score": None, "seconds": sys.float_info.max},
    ]
    drawn = against_rows(rows, "seconds", divide_by=1.0, higher_is_better=True)
    assert [(row["label"], row["front"]) for row in drawn] == [("a", True), ("b", False), ("c", True)]
