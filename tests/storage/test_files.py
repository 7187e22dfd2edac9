"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.storage.files import cache_folder, read_json, write_atomic, write_json


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    data = {"size": 32, "text": "größer · 大", "list": [1, None, 2.5]}
    write_json(tmp_path / "new" / "folder" / "file.json", data)
    assert read_json(tmp_path / "new" / "folder" / "file.json") == data


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match=r"cannot write .*file\.txt: No space left on device"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_writing_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file.txt", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="choose another folder"):
        write_json(tmp_path / "file" / "below.json", {})


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"nope"])
def test_what_is_not_json_reads_as_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.json").write_bytes(content)
    assert read_json(tmp_path / "file.json") is None


def test_what_is_not_there_reads_as_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") is None
    assert read_json(tmp_path) is None


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "brim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "brim"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / "home" / ".cache" / "brim"
