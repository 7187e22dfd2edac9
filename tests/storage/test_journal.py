"""The journal: whole lines or none, this work's or an error."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.storage.journal import Journal


def write(path: Path, count: int, *, fingerprint: str = "f") -> None:
    with Journal(path, fingerprint=fingerprint, resume=True) as journal:
        for item in range(count):
            journal.append([{"item": item, "text": "naïve\nline"}])


@given(st.integers(0, 2**30))
def test_a_cut_at_any_byte_leaves_whole_entries_only(tmp_path_factory: pytest.TempPathFactory, where: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    write(path, 5)
    content = path.read_bytes()
    cut = content[: where % (len(content) + 1)]
    path.write_bytes(cut)
    with Journal(path, fingerprint="f", resume=True) as journal:
        assert [entry["item"] for entry in journal.entries] == list(range(max(cut.count(b"\n") - 1, 0)))
        journal.append([{"item": 99}])
    with Journal(path, fingerprint="f", resume=True) as journal:
        assert journal.entries[-1] == {"item": 99}


def test_several_entries_are_appended_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, fingerprint="f") as journal:
        writes: list[bytes] = []
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or real(file, data))
        journal.append({"item": item} for item in range(3))
    assert len(writes) == 1
    assert [json.loads(line)["item"] for line in writes[0].splitlines()] == [0, 1, 2]


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    with pytest.raises(RequestError, match="2 results of an earlier run"), Journal(path, fingerprint="f"):
        pass
    assert path.read_text().count("\n") == 3


def test_other_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    with pytest.raises(RequestError, match="other items or settings"), Journal(path, fingerprint="g", resume=True):
        pass


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(RequestError, match="not a journal"), Journal(path, fingerprint="f", resume=True):
        pass
    assert path.read_text() == '{"mine": 1}\n'


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    path.write_text(path.read_text() + "not json\n" + '{"item": 3}\n')
    with pytest.raises(RequestError, match="line 4"), Journal(path, fingerprint="f", resume=True):
        pass


def test_a_full_disk_says_so_and_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    real = os.write

    def fill_up(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:5])

    with Journal(path, fingerprint="f", resume=True) as journal:
        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(RequestError, match="No space left on device; what was finished before is kept"):
            journal.append([{"item": 2}])
    monkeypatch.setattr(os, "write", real)
    with Journal(path, fingerprint="f", resume=True) as journal:
        assert [entry["item"] for entry in journal.entries] == [0, 1]


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write"), Journal(tmp_path / "file" / "j.jsonl", fingerprint="f"):
        pass
