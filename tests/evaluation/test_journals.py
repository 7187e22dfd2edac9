"""Files of several ranks: gathered before anyone writes, merged after everyone has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from brim.errors import LostError, RequestError
from brim.evaluation.journals import Journals, check_contents

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


def lines(*names: str) -> list[dict[str, Any]]:
    """Lines as the scorer makes them."""
    more = {"score": None, "scores": {}, "batch_size": 1, "error": None}
    return [{"id": name, "prediction": name.upper(), **more} for name in names]


def write(folder: Path, entries: Iterable[dict[str, Any]], *, rank: int, ranks: int = 3, of: str = "f") -> None:
    """What a rank leaves behind."""
    with Journals(folder, fingerprint=of, rank=rank, ranks=ranks) as journals:
        journals.append(entries)


def names(entries: Iterable[dict[str, Any]]) -> list[str]:
    return [entry["id"] for entry in entries]


def test_what_three_ranks_left_is_gathered_into_one_file(tmp_path: Path) -> None:
    for rank, name in enumerate("abc"):
        write(tmp_path, lines(name), rank=rank)
    with (tmp_path / "samples.rank-2.jsonl").open("a") as cut_short:
        cut_short.write('{"id": "d", "pred')
    assert names(Journals(tmp_path, fingerprint="f").gather_earlier(resume=True)) == ["a", "b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.json", "samples.jsonl"]
    assert names(Journals(tmp_path, fingerprint="f").gather_earlier(resume=True)) == ["a", "b", "c"]


def test_a_sample_in_two_files_is_gathered_once(tmp_path: Path) -> None:
    """As a kill leaves it between the writing of the gathered file and the removal of the others."""
    write(tmp_path, lines("a", "b"), rank=0)
    write(tmp_path, lines("b", "c"), rank=1)
    assert names(Journals(tmp_path, fingerprint="f").gather_earlier(resume=True)) == ["a", "b", "c"]


def test_only_a_further_ranks_file_is_enough_to_resume(tmp_path: Path) -> None:
    write(tmp_path, lines("b"), rank=1)
    assert names(Journals(tmp_path, fingerprint="f").gather_earlier(resume=True)) == ["b"]
    with Journals(tmp_path, fingerprint="f") as journals:
        journals.append(lines("a"))
    assert names(journals.merged()) == ["b", "a"]


def test_nothing_is_overwritten_without_resume(tmp_path: Path) -> None:
    write(tmp_path, lines("b"), rank=1)
    with pytest.raises(RequestError, match=r"samples\.rank-1\.jsonl holds 1 results of an earlier run"):
        Journals(tmp_path, fingerprint="f").gather_earlier(resume=False)
    assert (tmp_path / "samples.rank-1.jsonl").exists()


def test_a_further_ranks_file_of_other_work_is_refused(tmp_path: Path) -> None:
    write(tmp_path, lines("a"), rank=0)
    write(tmp_path, lines("b"), rank=1, of="another")
    with pytest.raises(RequestError, match=r"samples\.rank-1\.jsonl was written for other"):
        Journals(tmp_path, fingerprint="f").gather_earlier(resume=True)
    assert (tmp_path / "samples.rank-1.jsonl").exists()


def test_resume_needs_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--resume: .* holds no samples.jsonl"):
        check_contents(tmp_path, resume=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_results_are_named_before_anything_is_opened(tmp_path: Path, rank: int) -> None:
    write(tmp_path, [], rank=rank)
    check_contents(tmp_path, resume=False)  # a start that left nothing is not in the way
    write(tmp_path, lines("a"), rank=rank)
    with pytest.raises(RequestError, match="results of an evaluation; continue it with --resume"):
        check_contents(tmp_path, resume=False)
    check_contents(tmp_path, resume=True)


def test_a_file_of_the_users_own_is_not_offered_to_resume(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(RequestError, match="that brim eval did not write") as refused:
        check_contents(tmp_path, resume=False)
    assert "--resume" not in str(refused.value)


def test_a_line_that_is_damaged_while_the_run_continues_is_named(tmp_path: Path) -> None:
    write(tmp_path, lines("a"), rank=0)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"id": "\xff"}\n')
    with pytest.raises(LostError, match=r"samples\.jsonl, line 2 .*--resume"):
        Journals(tmp_path, fingerprint="f").merged()


def test_ranks_are_merged_and_their_files_removed(tmp_path: Path) -> None:
    for rank, name in enumerate("abc"):
        write(tmp_path, lines(name), rank=rank)
    journals = Journals(tmp_path, fingerprint="f", ranks=3)
    journals.finalise(sorted(journals.merged(), key=lambda entry: -ord(entry["id"])))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.json", "samples.jsonl"]
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert names(map(json.loads, text.splitlines())) == ["c", "b", "a"]


def test_a_file_that_rank_0_cannot_see_is_no_lost_sample_in_silence(tmp_path: Path) -> None:
    write(tmp_path, lines("a"), rank=0)
    with pytest.raises(LostError, match=r"does not see .*samples\.rank-1\.jsonl.* a folder that all machines share"):
        Journals(tmp_path, fingerprint="f", ranks=2).merged()
