"""`brim report`: a page anew, a comparison, and what is said of folders that are no runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reported_runs import profile_document, profile_entry, write_evaluation, write_find, write_profile

Brim = Callable[..., Any]


def test_one_run_gets_its_page_anew_and_the_command_says_where(brim: Brim, tmp_path: Path) -> None:
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


def test_what_is_wrong_is_said_with_exit_code_two(brim: Brim, tmp_path: Path) -> None:
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
