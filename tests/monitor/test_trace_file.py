from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from brim.monitor import trace_file
from brim.monitor.sampler import Sampler
from brim.monitor.trace_file import read_rows
from tests.monitor.fake_nvml import FakeNvml
from tests.monitor.sampling import HEADER, sample_once, wait_for_more, wait_until


def test_rows_wait_for_the_flush(path: Path) -> None:
    with Sampler(path, interval_seconds=0.01) as sampler:
        wait_for_more(sampler)
        assert path.read_text().splitlines() == [HEADER]
    assert len(read_rows(path)) == sampler.summary().samples


def test_rows_reach_the_disk_while_the_run_continues(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 0.02)
    with Sampler(path, interval_seconds=0.01) as sampler:
        wait_until(lambda: len(read_rows(path)) >= 3)
    assert len(read_rows(path)) == sampler.summary().samples  # each once


def test_a_resumed_run_continues_from_its_last_row_under_one_header(path: Path) -> None:
    path.write_text(f"{HEADER}\n99.5{',' * 12}\n100.25{',' * 12}\n")
    sample_once(path)
    times = [row["time_seconds"] for row in read_rows(path)]
    assert times[:2] == [99.5, 100.25]
    assert times == sorted(times)
    assert times[-1] < 130
    assert path.read_text().count("time_seconds") == 1


@pytest.mark.parametrize("cut", ["101.2", f"101.2{',' * 12}", "\0\0"])
def test_a_row_that_a_kill_cut_is_replaced_when_the_run_resumes(path: Path, cut: str) -> None:
    path.write_text(f"{HEADER}\n100.25{',' * 12}\n{cut}")
    sample_once(path)
    lines = path.read_text().splitlines()
    assert lines[:2] == [HEADER, f"100.25{',' * 12}"]
    assert [line.count(",") for line in lines] == [12] * 4
    assert 100.25 <= read_rows(path)[1]["time_seconds"] < 101


@pytest.mark.parametrize("left", ["", HEADER[:40]])
def test_a_cut_header_is_written_again(path: Path, left: str) -> None:
    path.write_text(left)
    sample_once(path)
    assert path.read_text().splitlines()[0] == HEADER
    assert len(read_rows(path)) == 2


def test_a_file_of_other_columns_is_left_as_it_is(path: Path) -> None:
    path.write_text("time_seconds,colour\n1.0,red\nhalf a")
    sampler = sample_once(path)
    assert path.read_text() == "time_seconds,colour\n1.0,red\nhalf a"
    assert "other columns" in str(sampler.write_error)
    assert sampler.summary().samples == 2


def test_the_folder_is_made(tmp_path: Path) -> None:
    sample_once(tmp_path / "runs" / "7" / "monitor.csv")
    assert len(read_rows(tmp_path / "runs" / "7" / "monitor.csv")) == 2


def test_a_folder_that_cannot_be_made_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sampler = sample_once(tmp_path / "file" / "monitor.csv")
    assert "Not a directory" in str(sampler.write_error) or "File exists" in str(sampler.write_error)
    assert sampler.summary().samples == 2


def test_a_folder_that_vanished_stops_the_writing_with_one_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 0.01)
    path = tmp_path / "run" / "monitor.csv"
    with Sampler(path, interval_seconds=0.005) as sampler:
        wait_until(lambda: len(read_rows(path)) >= 2)
        assert sampler.write_error is None
        shutil.rmtree(path.parent)
        wait_until(lambda: sampler.write_error is not None)
        reason = sampler.write_error
        path.parent.mkdir()  # what comes back is not the run's folder
        wait_for_more(sampler)
    assert "No such file" in str(reason)
    assert str(path) in str(reason)
    assert sampler.write_error == reason
    assert list(path.parent.iterdir()) == []


def test_a_file_that_was_deleted_is_not_begun_again_without_its_header(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 0.01)
    with Sampler(path, interval_seconds=0.005) as sampler:
        wait_until(lambda: len(read_rows(path)) >= 2)
        path.unlink()
        wait_for_more(sampler, 5)
    assert "No such file" in str(sampler.write_error)
    assert not path.exists()


def test_a_full_disk_stops_the_writing_and_keeps_the_whole_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(trace_file, "FLUSH_SECONDS", 0.01)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # in the middle of a row
        with Sampler(path, interval_seconds=0.005) as sampler:
            wait_until(lambda: sampler.write_error is not None)
            wait_for_more(sampler)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write" in str(sampler.write_error)
    assert path.stat().st_size <= 1000
    assert 2 <= len(read_rows(path)) < sampler.summary().samples


def test_rows_are_read_back_whatever_byte_a_kill_cut_at(fake: FakeNvml, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.csv", tmp_path / "cut.csv"
    sample_once(whole, index=0)
    content, rows = whole.read_bytes(), read_rows(whole)
    assert len(rows) == 2
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        assert read_rows(cut) == rows[: max(0, content[:length].count(b"\n") - 1)]


def test_a_row_of_rubbish_is_left_out_and_those_around_it_kept(path: Path) -> None:
    good = f"1.0{',' * 12}"
    path.write_bytes(
        f"{HEADER}\n{good}\n".encode() + b"\0\0\xff\n" + f"2.0,full{',' * 11}\n3.0,0.5\n,\n{good}\n".encode()
    )
    assert [row["time_seconds"] for row in read_rows(path)] == [1.0, 1.0]


def test_columns_are_read_by_the_name_in_the_header(path: Path) -> None:
    path.write_text("gpu_power_watts,time_seconds\n300,1.5\n")
    assert read_rows(path) == [{"gpu_power_watts": 300.0, "time_seconds": 1.5}]


def test_a_file_that_is_not_there_has_no_rows(path: Path) -> None:
    assert read_rows(path) == []
