"""The folder of a comparison: what is in it, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from brim.comparing.record import kept_comparison
from brim.errors import RequestError


class Table:
    def __init__(self, rounds: int = 3) -> None:
        self._rounds = rounds

    def rows(self) -> list[dict[str, Any]]:
        return [{"batch_size": 4, "rounds": self._rounds, "rates": [1.0], "speed_up": 1.0}]

    def recommendation(self) -> dict[str, Any]:
        return {"clear": True, "batch_size": 4, "text": "batch size 4"}


def keep(folder: Path, table: Table | None, error: BaseException | None = None) -> list[str]:
    notes: list[str] = []
    request = {"model": "m", "compare_batch": [4]}
    with kept_comparison(folder, command="eval --compare-batch", request=request, note=notes.append) as draft:
        draft.table = table
        draft.notes.append("a note")
        assert (folder / ".lock").exists()
        if error is not None:
            raise error
    return notes


def test_a_comparison_leaves_a_record_and_a_table(tmp_path: Path) -> None:
    keep(tmp_path / "run", Table())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["schema"], record["kind"]) == ("brim.run/1", "comparison")
    assert record["request"]["command"] == "eval --compare-batch"
    summary = record["summary"]
    assert summary["rows"][0]["rates"] == [1.0]
    assert summary["recommendation"]["batch_size"] == 4
    assert (summary["notes"], summary["interrupted"]) == (["a note"], False)
    with (tmp_path / "run" / "comparison.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"batch_size": "4", "rounds": "3", "speed_up": "1.0"}]
    assert not (tmp_path / "run" / ".lock").exists()


def test_ctrl_c_keeps_what_is_measured(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path / "run", Table(), KeyboardInterrupt())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["interrupted"] is True


@pytest.mark.parametrize("table", [None, Table(rounds=0)])
def test_ctrl_c_before_the_first_round_leaves_no_folder(tmp_path: Path, table: Table | None) -> None:
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path / "run", table, KeyboardInterrupt())
    assert not (tmp_path / "run").exists()


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="wrong"):
        keep(tmp_path / "run", Table(), RequestError("wrong"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["run.json", "samples.jsonl", "cells.jsonl"])
def test_a_folder_with_a_run_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(RequestError, match="choose another folder"):
        keep(tmp_path, Table())
    assert (tmp_path / file).read_text() == "{}"
