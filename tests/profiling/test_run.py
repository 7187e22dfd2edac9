"""A profile over a function: every point once, resumed and retried, and what its files hold."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from brim.errors import DoesNotFitError, RequestError
from brim.profiling.run import ProfileListener, profile
from tests.profiling import profile_runs
from tests.profiling.profile_runs import batches, request, run

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def test_every_point_is_evaluated_and_recorded_under_the_knobs_own_name(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert [(entry["reach"], entry["accuracy"]) for entry in result.entries] == [(2, 0.25), (4, 0.5), (6, 0.75)]
    for entry in result.entries:
        assert (entry["state"], entry["num_samples"], entry["num_failed"], entry["oom_events"]) == ("done", 8, 0, 0)
        assert entry["metric"] == "exact_match"
        assert entry["samples_per_second"] > 0
        assert entry["accuracy_std"] > 0
        assert entry["latency_ms"]["batch_1"]["total"]["p50"] > 0
        assert entry["latency_ms"]["batch_1"]["total"]["p95"] is None  # of two samples there is none
        assert entry["started_at"] < entry["ended_at"]
        assert (result.folder / entry["folder"] / "samples.jsonl").exists()


def test_the_folder_holds_the_documents(tmp_path: Path) -> None:
    result = run(tmp_path, within=0.4)
    document = json.loads((result.folder / "profile.json").read_text())
    assert document == json.loads(json.dumps(result.document))
    assert (document["schema"], document["knobs"], document["metric"]) == ("brim.profile/1", ["reach"], "exact_match")
    record = json.loads((result.folder / "run.json").read_text())
    assert (record["schema"], record["kind"], record["summary"]["num_points"]) == ("brim.run/1", "profile", 3)
    rows = list(csv.DictReader((result.folder / "profile.csv").read_text().splitlines()))
    assert [(row["reach"], row["accuracy"]) for row in rows] == [("2", "0.25"), ("4", "0.5"), ("6", "0.75")]
    recommendation = document["recommendation"]
    assert recommendation["best"] == 2
    assert recommendation["cheapest_within"] in (1, 2)  # 0.5 is enough, and 0.75 may have been the cheaper
    assert document["request"]["base"]["metrics"] == ["exact_match"]


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    first = run(tmp_path, axes={"reach": ("2", "4")})
    before = batches(tmp_path)
    again = run(tmp_path, axes={"reach": ("2", "4", "6")}, resume=True)
    assert {reach for reach, _ in batches(tmp_path)[len(before) :]} == {6}
    assert again.entries[:2] == first.entries
    assert [entry["accuracy"] for entry in again.entries] == [0.25, 0.5, 0.75]
    untouched = run(tmp_path, axes={"reach": ("2", "4", "6")}, resume=True)
    assert untouched.entries == again.entries
    assert untouched.document["environment"] == first.document["environment"] != {}
    assert untouched.document["started_at"] == first.document["started_at"]


def test_a_point_that_was_broken_off_continues_where_it_was(tmp_path: Path) -> None:
    class Stop(ProfileListener):
        batches = 0

        def batch(self, figures: Any, **more: Any) -> None:
            self.batches += 1
            if self.batches == 3:
                raise KeyboardInterrupt

    base = {"batch_size": 2}
    with pytest.raises(KeyboardInterrupt):
        profile(request(tmp_path, base=base), output=tmp_path / "run", listener=Stop())
    done_before = sum(count for reach, count in batches(tmp_path) if reach == 2 and count == 2)
    result = run(tmp_path, base=base, resume=True)
    assert [entry["accuracy"] for entry in result.entries] == [0.25, 0.5, 0.75]
    assert done_before >= 6
    assert result.entries[0]["num_resumed"] >= 4


def test_another_profile_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(RequestError, match="--resume"):
        run(tmp_path)
    with pytest.raises(RequestError, match="another model, data or settings"):
        run(tmp_path, base={"limit": 4}, resume=True)


def test_a_point_that_fails_stops_no_other_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, name="broken", axes={"reach": ("2", "3", "4")})
    assert [entry["state"] for entry in result.entries] == ["done", "failed", "done"]
    assert "three is not supported" in result.entries[1]["error"]
    assert result.document["recommendation"]["front"] in ([0], [2])
    monkeypatch.setattr(profile_runs, "FUNCTIONS", profile_runs.FUNCTIONS.replace("reach == 3", "reach == 33"))
    again = run(tmp_path, name="broken", axes={"reach": ("2", "3", "4")}, resume=True)
    assert [entry["state"] for entry in again.entries] == ["done", "done", "done"]


def test_where_nothing_fits_at_any_point_that_is_reported(tmp_path: Path) -> None:
    few = {"limit": 2}
    some = run(tmp_path, name="greedy", axes={"reach": ("6", "7")}, base=few)
    assert [(entry["state"], entry.get("exit_code")) for entry in some.entries] == [("done", None), ("failed", 3)]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(DoesNotFitError, match="no point fits"):
        run(tmp_path, name="greedy", axes={"reach": ("7", "8")}, base=few)
    assert (tmp_path / "run" / "profile.json").exists()


def test_a_ceiling_a_fixed_size_and_one_by_hand(tmp_path: Path) -> None:
    run(tmp_path, base={"batch_size": 4}, latency_samples=0, batch_size_for=(({"": "4"}, 2),))
    sizes = {reach: {count for one, count in batches(tmp_path) if one == reach} for reach in (2, 4, 6)}
    assert sizes == {2: {4}, 4: {2}, 6: {4}}


def test_several_knobs_are_columns_of_their_own(tmp_path: Path) -> None:
    result = run(tmp_path, axes={"reach": ("2", "4"), "width": ("1", "2")})
    assert [(entry["reach"], entry["width"]) for entry in result.entries] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert result.document["knobs"] == ["reach", "width"]
