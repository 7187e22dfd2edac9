"""Runs side by side: the document that is compared, and what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.errors import RequestError
from brim.reporting.kinds.compared import labels_of
from brim.reporting.write import comparison_of, write_comparison
from tests.reported_runs import (
    profile_document,
    profile_entry,
    sample_line,
    write_evaluation,
    write_find,
    write_profile,
)


def compare(*folders: Path) -> tuple[dict[str, Any], Any]:
    runs = [open_run(folder) for folder in folders]
    return comparison_of(runs)


def test_evaluations_are_paired_sample_by_sample(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "first", [1.0, 0.0, 1.0, 0.0])
    second = write_evaluation(tmp_path / "second", [1.0, 1.0, 1.0, 1.0], model="other")
    document, page = compare(first, second)
    pair = document["pairs"][0]
    assert (pair["common_samples"], pair["only_in_first"], pair["only_in_second"]) == (4, 0, 0)
    assert pair["metrics"]["vqa"]["difference"] == 0.5
    assert (pair["agreement"]["gained"], pair["agreement"]["lost"]) == (2, 0)
    assert [one["id"] for one in pair["agreement"]["examples"]["gained"]] == ["q1", "q3"]
    assert {"name": "model", "values": ["models/molmo2-1b", "other"]} in document["settings_that_differ"]
    assert page.headline == "second against first"
    assert {fact.name: fact.value for fact in page.facts}["samples that turned"] == "2 gained, 0 lost"


def test_a_difference_whose_interval_holds_zero_is_not_called_one(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "first", [1.0, 0.0] * 10)
    second = write_evaluation(tmp_path / "second", [0.0, 1.0] * 10)
    third = write_evaluation(tmp_path / "third", [1.0, 1.0] * 10)
    notes = [compare(first, other)[1].facts[0].note for other in (second, third)]
    assert notes == ["no difference beyond chance", "higher"]


def test_runs_on_other_samples_are_compared_unpaired_with_a_note(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "first", [1.0, 0.0])
    strangers = [sample_line(number, 1.0) for number in (7, 8)]
    second = write_evaluation(tmp_path / "second", [1.0, 1.0], lines=strangers)
    document, page = compare(first, second)
    assert document["pairs"][0]["agreement"] is None
    assert document["pairs"][0]["metrics"] == {"vqa": None, "exact_match": None}
    assert "have no sample in common" in page.warnings[0]
    assert "Paired differences" not in [section.title for section in page.sections]


def test_three_evaluations_are_each_paired_with_the_first(tmp_path: Path) -> None:
    folders = [write_evaluation(tmp_path / name, [1.0, 0.0]) for name in ("a", "b", "c")]
    document, page = compare(*folders)
    assert [(pair["first"], pair["second"]) for pair in document["pairs"]] == [(0, 1), (0, 2)]
    assert page.title == "3 evaluations compared"


def test_profiles_are_compared_at_the_values_they_share(tmp_path: Path) -> None:
    slower = [{**profile_entry(crops), "samples_per_second": 10.0} for crops in (3, 4, 20)]
    first = write_profile(tmp_path / "first", profile_document([profile_entry(2), profile_entry(3), profile_entry(4)]))
    second = write_profile(tmp_path / "second", profile_document(slower))
    document, page = compare(first, second)
    values = {point["max_crops"]: [value is not None for value in point["values"]] for point in document["points"]}
    assert values == {2: [True, False], 3: [True, True], 4: [True, True], 20: [False, True]}
    changes = {point["max_crops"]: point["differences"][1] for point in document["points"]}
    assert changes[2] is changes[20] is None
    assert changes[3]["difference"] == 0
    assert not changes[3]["paired"]
    titles = [section.title for section in page.sections]
    assert titles == [
        "Accuracy", "Difference in accuracy", "Accuracy against cost", "Throughput", "Reserved memory", "What differs",
    ]  # fmt: skip
    throughput = page.sections[3].table
    row = [cell.text for cell in throughput.cells()[1]]
    assert row == ["3", "92.9", "10.0", "0.108×"]


def test_values_that_kept_their_samples_are_paired(tmp_path: Path) -> None:
    for name, scores in (("first", [1.0, 0.0]), ("second", [1.0, 1.0])):
        write_profile(tmp_path / name, profile_document([profile_entry(2)]))
        write_evaluation(tmp_path / name / "values" / "max_crops=2", scores)
    change = compare(tmp_path / "first", tmp_path / "second")[0]["points"][0]["differences"][1]
    assert change == {"difference": 0.5, "ci95": pytest.approx(0.98, abs=0.01), "count": 2, "paired": True}


def test_profiles_by_other_metrics_get_no_difference_and_a_warning(tmp_path: Path) -> None:
    first = write_profile(tmp_path / "first", profile_document([profile_entry(2)]))
    second = write_profile(tmp_path / "second", profile_document([profile_entry(2)], metric="bleu"))
    document, page = compare(first, second)
    assert document["points"][0]["differences"] == [None, None]
    assert "different metrics (vqa, bleu)" in page.warnings[0]


def test_profiles_over_other_knobs_cannot_be_compared(tmp_path: Path) -> None:
    first = write_profile(tmp_path / "first", profile_document([profile_entry(2)]))
    second = write_profile(tmp_path / "second", profile_document([{**profile_entry(2), "size": 2}], knobs=("size",)))
    with pytest.raises(RequestError, match="second is a profile over size, first over max_crops"):
        compare(first, second)


def test_searches_are_compared_figure_by_figure(tmp_path: Path) -> None:
    folders = [write_find(tmp_path / "a"), write_find(tmp_path / "b", summary={"batch_size_used": 8})]
    document, page = compare(*folders)
    assert {"name": "batch_size_used", "values": ["145", "8"]} in document["figures"]
    assert page.title == "2 runs compared (find)"


def test_runs_of_two_kinds_and_one_run_twice_are_refused(tmp_path: Path) -> None:
    evaluation, search = write_evaluation(tmp_path / "a"), write_find(tmp_path / "b")
    with pytest.raises(RequestError, match=r"of the kind eval.*of the kind find; compare runs of one kind"):
        compare(evaluation, search)
    with pytest.raises(RequestError, match="given twice"):
        compare(search, tmp_path / "b" / ".." / "b")
    with pytest.raises(RequestError, match="two runs or more"):
        write_comparison([search], tmp_path / "out.html")


def test_labels_are_as_short_as_they_can_be() -> None:
    assert labels_of([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert labels_of([Path("/monday/a"), Path("/tuesday/a")]) == ["monday/a", "tuesday/a"]
