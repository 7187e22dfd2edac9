"""What is a run's folder, and what is said of everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.advice.run_reader import open_run
from brim.errors import RequestError
from tests.reported_runs import profile_document, write_evaluation, write_find, write_json, write_profile


def test_a_run_is_opened_by_its_folder_or_by_one_of_its_files(tmp_path: Path) -> None:
    write_find(tmp_path)
    (tmp_path / "report.html").write_text("old")
    for path in (tmp_path, tmp_path / "run.json", tmp_path / "report.html"):
        assert (open_run(path).kind, open_run(path).folder) == ("find", tmp_path)


def test_a_profile_s_request_is_one_with_its_evaluation_s(tmp_path: Path) -> None:
    document = profile_document(request={"base": {"model": "m", "limit": 8}, "axes": {"size": None}, "limit": 9})
    write_profile(tmp_path, document)
    assert open_run(tmp_path).request == {"model": "m", "limit": 9, "axes": {"size": None}}


def test_a_profile_without_run_json_is_still_a_profile(tmp_path: Path) -> None:
    write_json(tmp_path / "profile.json", profile_document())
    assert open_run(tmp_path).kind == "profile"


def test_lines_of_samples_that_are_cut_are_counted_and_the_rest_kept(tmp_path: Path) -> None:
    write_evaluation(tmp_path, (1.0, 0.0))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('\n[1]\n{"id": "q')
    samples = open_run(tmp_path).samples()
    assert (len([*samples]), samples.damaged) == (2, 2)
    assert (len([*samples]), samples.damaged) == (2, 2)  # read anew, counted anew


def test_a_folder_named_in_a_document_must_lie_inside_the_run(tmp_path: Path) -> None:
    run = open_run(write_find(tmp_path / "run"))
    assert run.inside("values/size=2") == tmp_path / "run" / "values" / "size=2"
    assert [run.inside(name) for name in ("../other", "/etc", "", None, 3, "a\0b", "\ud800")] == [None] * 7


def damaged(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: at / "absent", "there is no such folder; give a run's folder"),
        (lambda at: ((at / "notes.txt").write_text("") and None) or at / "notes.txt", "it is a file; give a run"),
        (lambda at: at, "no run.json in it; give the folder of a run: what -o named"),
        (lambda at: write_find(at / "runs" / "one").parent, "but in folders below; give one, such as"),
        (lambda at: damaged(at / "run", '{"schema": '), "it is not JSON"),
        (lambda at: damaged(at / "run", "[" * 100_000), "nested too deeply"),
        (lambda at: damaged(at / "run", "[1]"), "it is not a JSON object"),
        (lambda at: damaged(at / "run", "{}"), "no run of brim wrote it"),
        (lambda at: damaged(at / "run", '{"schema": "brim.run/2"}'), "use the brim that wrote version 2"),
        (lambda at: damaged(at / "run", '{"schema": "brim.run/1"}'), "does not say which kind"),
        (lambda at: damaged(at / "run", '{"schema": "brim.run/1", "kind": "profile"}'), "no profile.json"),
    ],
)  # fmt: skip
def test_anything_else_is_a_wrong_request_that_says_what_to_do(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(RequestError) as error:
        open_run(make(tmp_path))
    assert said in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "brim.profile/9"}, "use the brim that wrote version 9"),
        ({"summary": {"a": 1}}, "its summary is not a list of points"),
        ({"summary": [1]}, "its summary is not a list of points"),
        ({"knobs": []}, "does not name its knobs"),
    ],
)
def test_a_damaged_profile_is_a_wrong_request(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_profile(tmp_path, profile_document())
    write_json(
        tmp_path / "profile.json",
        profile_document(**change) if "summary" not in change else {**profile_document(), **change},
    )
    with pytest.raises(RequestError, match=said):
        open_run(tmp_path)


def test_an_unfinished_run_is_shown_with_its_resume_command(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(RequestError, match="--resume -o"):
        open_run(tmp_path)


def test_figures_that_are_not_json_are_unknown(tmp_path: Path) -> None:
    write_find(tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    document["summary"] = {"loss": float("nan")}
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert open_run(tmp_path).summary == {"loss": None}
