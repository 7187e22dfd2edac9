"""`brim report`: a page anew, a comparison, and what is said of folders that are no runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reported_runs import (
    profile_document,
    profile_entry,
    sample_line,
    write_evaluation,
    write_find,
    write_profile,
)

Brim = Callable[..., Any]


def test_reporting_one_run_rewrites_its_page_and_prints_the_path(brim: Brim, tmp_path: Path) -> None:
    folder = write_find(tmp_path / "run")
    (folder / "report.html").write_text("old")
    result = brim("report", str(folder))
    assert (result.code, result.out, result.err) == (0, f"report in {folder / 'report.html'}\n", "")
    assert "<!doctype html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "run.json"]


def test_the_page_goes_where_it_is_asked_to(brim: Brim, tmp_path: Path) -> None:
    folder = write_find(tmp_path / "run")
    assert brim("report", str(folder), "-o", str(tmp_path / "pages" / "one.html")).code == 0
    assert brim("report", str(folder), "--output", str(tmp_path / "pages")).code == 0
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["one.html", "report.html"]
    assert not (folder / "report.html").exists()


def test_json_of_one_run_names_the_page(brim: Brim, tmp_path: Path) -> None:
    result = brim("report", str(write_find(tmp_path)), "--json")
    assert json.loads(result.out)["report"] == str(tmp_path / "report.html")


def test_two_runs_are_compared_in_the_current_folder(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_evaluation(Path("one"), [1.0, 0.0, 1.0])
    write_evaluation(Path("two"), [1.0, 1.0, 1.0])
    result = brim("report", "one", "two", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["schema"] == "brim.comparison/1"
    assert document["pairs"][0]["agreement"]["gained"] == 1
    assert "report in report-compare.html" in result.err
    assert "2 evaluations compared" in Path("report-compare.html").read_text(encoding="utf-8")


def test_two_profiles_are_compared(brim: Brim, tmp_path: Path) -> None:
    runs = [write_profile(tmp_path / name, profile_document([profile_entry(2), profile_entry(3)])) for name in "ab"]
    result = brim("report", *map(str, runs), "-o", str(tmp_path / "both.html"))
    assert (result.code, result.out) == (0, f"report in {tmp_path / 'both.html'}\n")


def test_profiles_on_different_data_are_shown_with_a_warning(brim: Brim, tmp_path: Path) -> None:
    """The samples have the same numbers for ids, and are others."""
    for name, scores in (("a", [0.0] * 20), ("b", [1.0] * 20)):
        document = profile_document([profile_entry(2)])
        document["request"] = {**document["request"], "data": f"{name}.jsonl"}
        write_profile(tmp_path / name, document)
        value = write_evaluation(tmp_path / name / "values" / "max_crops=2", scores)
        record = json.loads((value / "run.json").read_text())
        record["summary"]["fingerprint"] = f"model:1 data:{name} settings:3"
        (value / "run.json").write_text(json.dumps(record))
    output = tmp_path / "both.html"
    result = brim("report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(output), "--json")
    document = json.loads(result.out)
    assert document["data_differs"] is True
    assert "a: a.jsonl, b: b.jsonl" in document["warnings"][0]
    assert document["points"][0]["differences"][1]["ci95"] is None
    assert "a: a.jsonl, b: b.jsonl" in " ".join(result.err.split())
    page = output.read_text(encoding="utf-8")
    assert page.index("made on different data") < page.index('class="headline"')
    assert "leaves zero out at" not in page


def test_evaluations_on_different_data_are_not_paired_by_id(brim: Brim, tmp_path: Path) -> None:
    runs = []
    for name, score in (("a", 0.0), ("b", 1.0)):
        lines = [sample_line(n, score, input=f"{name} {n}") for n in range(20)]
        run = write_evaluation(tmp_path / name, [score] * 20, lines=lines)
        record = json.loads((run / "run.json").read_text())
        record["summary"]["fingerprint"] = f"model:1 data:{name} settings:3"
        (run / "run.json").write_text(json.dumps(record))
        runs.append(str(run))
    document = json.loads(brim("report", *runs, "-o", str(tmp_path / "both.html"), "--json").out)
    assert document["data_differs"] is True
    assert "other content under the same name" in document["warnings"][0]
    (pair,) = document["pairs"]
    assert (pair["judged"], pair["common_samples"], pair["metrics"]["vqa"]) == (False, 0, None)
    moved = tmp_path / "moved"
    record["request"]["data"] = "/elsewhere/val"
    write_evaluation(moved, [1.0] * 20)
    (moved / "run.json").write_text(json.dumps(record))
    same = json.loads(brim("report", runs[1], str(moved), "-o", str(tmp_path / "same.html"), "--json").out)
    assert (same["data_differs"], same["pairs"][0]["judged"]) == (False, True), "the same content under another name"


def test_what_is_wrong_is_printed_with_exit_code_two(brim: Brim, tmp_path: Path) -> None:
    search, evaluation = write_find(tmp_path / "find"), write_evaluation(tmp_path / "eval")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    wrong = {
        (str(tmp_path / "absent"),): "there is no such folder",
        (str(damaged),): "it is not JSON",
        (str(tmp_path),): "but in folders below",
        (str(search), str(evaluation)): "compare runs of one kind",
        (str(search), str(search)): "given twice",
        (str(search), str(damaged)): "it is not JSON",
        (str(search), "-o", str(tmp_path / "page.txt")): "ends in .html",
    }
    for arguments, said in wrong.items():
        result = brim("report", *arguments)
        assert result.code == 2, arguments
        assert said in result.err.replace("\n", ""), arguments
        assert "Traceback" not in result.err
    assert brim("report").code == 2


def test_a_folder_that_cannot_be_written_is_named(brim: Brim, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = brim("report", str(write_find(tmp_path / "run")), "-o", str(tmp_path / "taken" / "page.html"))
    assert result.code == 2
    assert "cannot write" in result.err


def test_help_shows_an_example(brim: Brim) -> None:
    shown = brim("report", "--help").out
    assert "--output" in shown
    assert "Example: brim report runs/" in shown


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_profile(tmp_path, profile_document([profile_entry(2), profile_entry(3)]))
    code = f"import sys; from brim.cli.main import run\ntry: run(['report', {str(folder)!r}])\n"
    code += "finally: print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "report in" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].strip("[]").replace("'", "").split(", "))
    assert "altair" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "pandas", "pynvml"})
