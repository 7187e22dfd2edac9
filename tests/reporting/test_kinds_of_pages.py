"""What the page of each kind of run says: the answer first, failures aloud, a text for every case."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.reporting.base import Page, Section
from brim.reporting.charts import Axis, Chart
from brim.reporting.write import page_of, write_report
from tests.reported_runs import (
    failed_entry,
    plan_document,
    profile_document,
    profile_entry,
    sample_line,
    write_evaluation,
    write_find,
    write_forecast,
    write_json,
    write_profile,
    write_run,
)


def page(folder: Path) -> Page:
    return page_of(open_run(folder))


def section(of: Page, title: str) -> Section:
    return next(one for one in of.sections if one.title == title)


def cells(of: Section) -> list[list[str]]:
    assert of.table is not None
    return [[cell.text for cell in row] for row in of.table.cells()]


def test_a_forecast_shows_memory_by_module_and_what_its_check_found(tmp_path: Path) -> None:
    made = page(write_forecast(tmp_path, "resnet18"))
    assert made.headline == "Largest batch size that fits: 2 on NVIDIA T4"
    rows = cells(section(made, "NVIDIA T4: memory by module"))
    assert [row[:3] for row in rows] == [
        ["layer1.0", "1.8 GiB", "87.5 %"],
        ["(the model itself)", "256.0 MiB", "12.5 %"],
    ]
    assert cells(section(made, "Check"))[0][:2] == ["resnet18", "grew"]


def test_workloads_of_a_file_are_shown_each_and_failures_on_top(tmp_path: Path) -> None:
    made = page(write_forecast(tmp_path, "one", "two"))
    assert made.title == "Forecast of 3 workloads"
    assert made.warnings == ("broken: layer1.0: it raised",)
    titles = [one.title for one in made.sections]
    assert titles[:3] == ["Check", "one, NVIDIA T4", "one, NVIDIA T4: memory by module"]
    assert "two, NVIDIA T4: memory by module" in titles


def test_a_profile_opens_with_what_to_take_and_what_it_costs(tmp_path: Path) -> None:
    made = page(write_profile(tmp_path, profile_document()))
    assert made.title == "Profile of molmo2-1b"
    assert made.headline == "Recommended: max_crops = 11"
    facts = {fact.name: (fact.value, fact.note) for fact in made.facts}
    assert facts["vqa"] == ("0.764 ± 0.018", "best 0.766 at 12")
    assert facts["throughput"] == ("40.5 samples/s", "1.03× the rate at 12")
    assert facts["batch size"] == ("54", "largest safe 54")
    assert facts["reserved memory"] == ("23.8 GiB", "of 24.0 GiB")
    assert made.remarks == ("Within 1 % of the best accuracy, it is the cheapest value.",)
    assert made.warnings == ()
    assert section(made, "How to repeat it").command == "brim profile -m models/molmo2-1b -d vqa/val --knob max_crops"


def test_charts_of_a_profile_are_described_in_words(tmp_path: Path) -> None:
    made = page(write_profile(tmp_path, profile_document()))
    said = {chart.title: chart.caption for one in made.sections for chart in one.charts}
    assert "from 0.517" in said["Accuracy (vqa)"]
    assert "Recommended: 11, vqa 0.764 ± 0.018 at 24.7 ms." in said["vqa against time per sample"]
    assert "Did not fit: 96 at 6, 7, 8 and 5 more (out of memory)." in said["Sizes tried (samples)"]
    assert max(len(text) for text in said.values()) < 200, "a caption says what is seen; values are in the table"
    assert "Hollow points are saturated: at max_crops 13" in " ".join(section(made, "Accuracy").paragraphs)


def test_a_failed_value_is_reported_first_and_in_every_table(tmp_path: Path) -> None:
    entries = [profile_entry(2), failed_entry(max_crops=3), {**profile_entry(4), "num_failed": 7}]
    made = page(write_profile(tmp_path, profile_document(entries)))
    assert made.warnings[0] == "max_crops=3: no sample fits, even alone"
    assert made.warnings[1].startswith("7 samples failed")
    assert cells(section(made, "All values"))[1][:4] == ["3", "failed", "—", "—"]
    crosses = [chart for chart in section(made, "Accuracy").charts if "failed" in [key.label for key in chart.keys]]
    assert len(crosses) == 2


def test_a_profile_of_failed_points_recommends_nothing(tmp_path: Path) -> None:
    made = page(write_profile(tmp_path, profile_document([failed_entry(max_crops=2)])))
    assert made.headline == "No value can be recommended"
    assert section(made, "Memory").paragraphs == ("No memory was measured on this device.",)
    assert section(made, "Latency").paragraphs == ("No latency was measured.",)
    assert section(made, "Batch-size search").paragraphs[0].startswith("No size was searched for")


def test_without_a_gpu_the_host_is_shown_with_a_note(tmp_path: Path) -> None:
    made = page(write_profile(tmp_path, profile_document([profile_entry(2), profile_entry(3)]), gpu=False))
    machine = section(made, "The machine over time")
    assert machine.paragraphs[0] == "No GPU was seen, so these are the host's figures."
    assert [chart.title for chart in machine.charts] == ["CPU use, of all cores", "Memory of the process (GiB)"]
    assert [row[0] for row in cells(machine)] == ["2", "3"]


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    write_evaluation(tmp_path)
    (tmp_path / "monitor.csv").unlink()
    assert "no monitor.csv" in section(page(tmp_path), "The machine over time").paragraphs[0]


def test_every_value_of_a_profile_links_to_its_own_report(tmp_path: Path) -> None:
    entries = [profile_entry(2), profile_entry(3)]
    write_profile(tmp_path, profile_document(entries))
    write_evaluation(tmp_path / entries[0]["folder"])
    write_json(tmp_path / entries[1]["folder"] / "run.json", {"schema": "brim.run/9"})
    report = write_report(tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "values" / "max_crops=2" / "report.html").exists()
    assert '<a href="values/max_crops%3D2/report.html">2</a>' in report
    assert "no report of its own" in report
    assert "values/max_crops%3D3" not in report


def test_an_evaluation_page_shows_its_metric_and_failures(tmp_path: Path) -> None:
    lines = [sample_line(0, 1.0), sample_line(1, 0.0, error={"reason": "out_of_memory", "message": "needs 9 GiB"})]
    write_evaluation(tmp_path, (1.0, 0.0), lines=lines)
    document = json.loads((tmp_path / "run.json").read_text())
    document["summary"] |= {"num_failed": 1, "num_bad_records": 2}
    write_json(tmp_path / "run.json", document)
    made = page(tmp_path)
    assert made.headline.startswith("vqa: 0.500 ± ")
    assert made.warnings == ("1 sample failed: counted as wrong.", "2 records could not be read and were left out.")
    assert cells(section(made, "Failed samples")) == [["q1", "out_of_memory", "needs 9 GiB"]]
    assert [row[0] for row in cells(section(made, "Examples"))] == ["q0"]
    assert "cap of 19,200 tokens" in " ".join(section(made, "Speed and memory").paragraphs)


def test_a_figure_of_the_whole_corpus_gets_no_interval_of_its_samples(tmp_path: Path) -> None:
    metrics = {"bleu": {"value": 0.31, "mean": 0.25, "std": 0.2, "count": 9, "ci95": 0.1}}
    made = page(write_evaluation(tmp_path, summary={"num_samples": 9, "metrics": metrics}))
    assert made.headline == "bleu: 0.310"


def test_a_search_shows_every_size_and_marks_the_one_that_did_not_fit(tmp_path: Path) -> None:
    made = page(write_find(tmp_path))
    assert made.headline == "Batch size 145: the smallest size within 2% of the best rate in reach"
    search = section(made, "Batch-size search")
    assert [row[:2] for row in cells(search)][3] == ["153", "out of memory"]
    assert [key.label for key in search.charts[0].keys] == ["fits", "did not fit", "chosen", "memory limit"]
    assert search.charts[0].caption.endswith("Did not fit: 153 (out of memory).")


@pytest.mark.parametrize(("traced", "said"), [(0.0003, ""), (0.9, "0.900 s of it for the forecast")])
def test_the_time_of_a_search_names_its_forecast_where_there_was_one(tmp_path: Path, traced: float, said: str) -> None:
    made = page(write_find(tmp_path, plan={**plan_document(), "seconds": {"total": 2.0, "forecast": traced}}))
    assert next(fact.note for fact in made.facts if fact.name == "search") == said


def test_a_plan_from_the_cache_has_no_probes_to_show(tmp_path: Path) -> None:
    made = page(write_find(tmp_path, plan={**plan_document(), "probes": []}))
    assert section(made, "Batch-size search").paragraphs == ("The plan came from the cache: no size was tried.",)


def test_a_kind_without_a_page_of_its_own_has_its_summary_as_a_table(tmp_path: Path) -> None:
    summary = {"epochs": 3, "final": {"loss": 0.25}}
    made = page(write_run(tmp_path, kind="calibrate", request={"model": "m"}, plan=None, summary=summary))
    assert made.title == "Calibrate of m"
    assert cells(section(made, "Summary")) == [["epochs", "3"], ["final.loss", "0.250"]]


@pytest.mark.parametrize("junk", [None, "x", [], {}, -1, 1e308, True, [None, "x", {}]], ids=repr)
def test_a_profile_with_nonsense_in_one_value_still_has_a_page(tmp_path: Path, junk: Any) -> None:
    entries = [profile_entry(2), dict.fromkeys(profile_entry(3), junk) | {"max_crops": 3}, profile_entry(4)]
    document = {**profile_document(), "summary": entries}
    write_json(tmp_path / "profile.json", document | dict.fromkeys(("notes", "recommendation", "metric"), junk))
    assert len(page(tmp_path).sections) >= 9


def test_a_chart_without_a_table_or_without_words_cannot_be_made() -> None:
    chart = Chart(title="Accuracy", caption="rises", x=Axis(), y=Axis(), marks=())
    with pytest.raises(AssertionError, match="has a chart but no table"):
        Section(title="Accuracy", charts=(chart,))
    with pytest.raises(AssertionError, match="says nothing"):
        dataclasses.replace(chart, caption=" ")
