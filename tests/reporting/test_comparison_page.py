"""The page of a comparison: the recommendation first, a chart with intervals, every row with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.reporting.base import Page, Section
from brim.reporting.write import page_of
from tests.reported_runs import write_compared_sizes, write_explained_speed, write_run


def page(folder: Path) -> Page:
    return page_of(open_run(folder))


def column(of: Section, title: str) -> list[str]:
    assert of.table is not None
    place = [one.title for one in of.table.columns].index(title)
    return [row[place].text for row in of.table.cells()]


def test_compared_sizes_open_with_the_size_to_take(tmp_path: Path) -> None:
    made = page(write_compared_sizes(tmp_path))
    assert made.headline.startswith("Batch size 2048: ")
    rate, memory = made.sections[:2]
    assert column(rate, "speed-up")[:3] == ["1.00×", "2.67×", "2.69×"]
    assert column(rate, "95 % interval")[1] == "2.61 to 2.72"
    assert column(rate, "verdict")[1:] == ["clear", "clear", "not even one sample fits"]
    assert column(memory, "OOM risk") == ["low", "low", "low", "does not fit"]


def test_the_rate_is_drawn_over_the_size_with_intervals_and_failures(tmp_path: Path) -> None:
    chart = page(write_compared_sizes(tmp_path)).sections[0].charts[0]
    marks = {one.mark: [row["x"] for row in one.rows] for one in chart.marks}
    assert marks["interval"] == marks["point"] == [512, 2048, 8192]
    assert marks["ring"] == [2048]
    assert marks["cross at the bottom"] == [32768]


def test_optimisations_are_drawn_beside_no_change(tmp_path: Path) -> None:
    made = page(write_explained_speed(tmp_path))
    first = made.sections[0]
    marks = {one.mark: one.rows for one in first.charts[0].marks}
    assert [row["name"] for row in marks["interval"]] == [
        "batching at all", "loading processes", "scoring beside the device",
    ]  # fmt: skip
    assert [row["x"] for row in marks["rule"]] == [1.0]
    assert column(first, "verdict")[2].startswith("not clear: ")


def test_a_comparison_that_was_stopped_says_so(tmp_path: Path) -> None:
    assert page(write_compared_sizes(tmp_path, interrupted=True)).warnings
    assert not page(write_compared_sizes(tmp_path / "whole")).warnings


def test_the_command_can_be_repeated(tmp_path: Path) -> None:
    commands = [one.command for one in page(write_explained_speed(tmp_path)).sections if one.command]
    assert commands == ["brim profile --explain-speed -m org/molmo2-1b -d vqa"]
    commands = [one.command for one in page(write_compared_sizes(tmp_path / "sizes")).sections if one.command]
    assert commands == ["brim train config.yaml --compare-batch 512,2048,8192,32768"]


@pytest.mark.parametrize("summary", [{}, {"rows": []}, {"rows": [{}], "recommendation": 3}, {"rows": ["x", None]}])
def test_a_record_with_little_in_it_still_has_a_page(tmp_path: Path, summary: dict[str, Any]) -> None:
    folder = write_run(tmp_path, kind="comparison", request={"command": "eval --compare-batch"}, summary=summary)
    assert page(folder).title
