"""One run, one folder with a `run.json` that says what was asked, under what, and what came of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import RequestError
from brim.storage.run_folder import check_folder, check_no_other_run, keep_command_line, write_run


def write(folder: Path) -> dict[str, Any]:
    path = write_run(
        folder,
        kind="find",
        request={"model": "a"},
        environment={"torch": "2.6"},
        plan=None,
        summary={"batch_size_used": 8},
        started_at=datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=90),
    )
    assert path == folder / "run.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def test_the_document_has_the_fields_of_the_interface(tmp_path: Path) -> None:
    data = write(tmp_path / "runs" / "one")
    assert list(data) == [
        "schema", "kind", "request", "environment", "plan", "summary", "started_at", "ended_at", "duration_seconds",
    ]  # fmt: skip
    assert (data["schema"], data["kind"], data["summary"]) == ("brim.run/1", "find", {"batch_size_used": 8})
    started, ended = (datetime.datetime.fromisoformat(data[name]) for name in ("started_at", "ended_at"))
    assert started.tzinfo is not None
    assert data["duration_seconds"] == pytest.approx((ended - started).total_seconds())
    assert data["duration_seconds"] >= 90


def test_an_existing_folder_is_used_and_its_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run.json"]


def test_a_file_in_the_place_of_the_folder_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(RequestError, match=r"output=.*taken': it is a file; give a folder"):
        write(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "taken/below"])
def test_a_name_that_cannot_be_a_folder_is_a_wrong_request(tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(RequestError, match=r"output=.*choose another folder"):
        check_folder(tmp_path / name)


def test_the_record_of_another_command_is_not_overwritten(tmp_path: Path) -> None:
    check_no_other_run(tmp_path, "eval")
    write(tmp_path)
    check_no_other_run(tmp_path, "find")
    with pytest.raises(RequestError, match="holds a run of brim find; choose another folder"):
        check_no_other_run(tmp_path, "eval")


def test_a_record_says_with_which_command_it_was_made(tmp_path: Path) -> None:
    keep_command_line(["brim", "find", "a", "-b", "8"])
    try:
        assert write(tmp_path / "by-command")["request"] == {"model": "a", "argv": ["brim", "find", "a", "-b", "8"]}
    finally:
        keep_command_line([])
    assert write(tmp_path / "by-call")["request"] == {"model": "a"}


def test_a_record_can_be_read_by_whoever_may_read_the_folder(tmp_path: Path) -> None:
    write(tmp_path)
    plain = tmp_path / "plain.txt"
    plain.write_text("x")
    assert (tmp_path / "run.json").stat().st_mode == plain.stat().st_mode
