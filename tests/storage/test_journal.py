"""The journal: whole lines or none, this work's or an error."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(b"not json", "not JSON"), (b'{"item": "\xff"}', "not UTF-8"), (b"[1]", "not a JSON object"), (b"", "not JSON"),
     (b"[" * 100_000, "not JSON"), (b'{"text": 1}', "no item")],
)  # fmt: skip
def test_a_damaged_line_is_skipped_and_the_file_backed_up(tmp_path: Path, damage: bytes, reason: str) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 2)
    before = path.read_bytes() + damage + b"\n" + b'{"item": 3}\n{"item": 4'
    path.write_bytes(before)

    def check(entry: Any) -> str | None:
        return None if "item" in entry else "no item"

    with Journal(path, fingerprint="f", resume=True, check=check) as journal:
        assert [entry["item"] for entry in journal.entries] == [0, 1, 3]
        journal.append([{"item": 5}])
    (note,) = journal.notes
    assert f"line 4 ({reason})" in note
    assert (tmp_path / "j.jsonl.damaged").read_bytes() == before
    with Journal(path, fingerprint="f", resume=True, check=check) as again:
        assert [entry["item"] for entry in again.entries] == [0, 1, 3, 5]
    assert again.notes == []


def test_every_damaged_file_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    for number in range(2):
        write(path, number)
        path.write_bytes(path.read_bytes() + b"%d\n" % number)
        write(path, 0)
    assert [(tmp_path / f"j.jsonl.damaged{suffix}").read_bytes()[-2:] for suffix in ("", "-2")] == [b"0\n", b"1\n"]


def test_a_lone_surrogate_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, fingerprint="f") as journal:
        journal.append([{"text": "a\udc80b \ud83d ü"}])
    with Journal(path, fingerprint="f", resume=True) as journal:
        assert journal.entries == [{"text": "a\udc80b \ud83d ü"}]


@pytest.mark.parametrize("content", [b"mine, without an end of line", b"mine\n", b"mine\nand mine", b'{"mine": 1}'])
def test_a_file_of_anything_else_is_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="not a journal"), Journal(path, fingerprint="f", resume=True):
        pass
    with (
        pytest.raises(RequestError, match="not a journal"),
        Journal(path, fingerprint="f", label=tmp_path / "journal.json"),
    ):
        pass
    assert path.read_bytes() == content
    assert not (tmp_path / "journal.json").exists()


def test_a_device_or_a_pipe_is_no_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(RequestError, match="not a regular file"), Journal(path, fingerprint="f", resume=True):
            pass


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_system_takes_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot write"), Journal(tmp_path / name, fingerprint="f"):
        pass


def test_a_first_write_that_fails_does_not_promise_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(tmp_path / "j.jsonl", fingerprint="f") as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RequestError, match="No space left on device") as refused:
            journal.append([{"item": 0}])
    assert "finished before" not in str(refused.value)


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
