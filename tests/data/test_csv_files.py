from __future__ import annotations

import csv
from pathlib import Path

import pytest

from brim.errors import RequestError
from tests.data.media_files import opened

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


def test_rows_become_samples_numbered_by_the_line_they_start_on(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"a, b",yes\r\n\r\n"two\r\nlines",no\r\nlast,maybe\r\n')
    found = opened(file)
    assert found.format == "csv"
    assert [(each.id, each.prompt, each.references) for each in found.samples] == [
        ("2", "a, b", ("yes",)),
        ("4", "two\r\nlines", ("no",)),
        ("6", "last", ("maybe",)),
    ]


def test_tabs_separate_the_cells_of_a_tsv(tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_text("text\tlabel\nfine, really\tgood\nawful\tbad\n")
    found = opened(tmp_path / "data.tsv")
    assert [each.prompt for each in found.samples] == ["fine, really", "awful"]
    assert found.class_names == ("bad", "good")


def test_a_line_separator_does_not_end_a_row(file: Path) -> None:
    file.write_text("question,answer\nfirst\u2028second,yes\n", encoding="utf-8")
    assert opened(file).samples[0].prompt == "first\u2028second"


def test_a_cell_may_be_longer_than_the_csv_modules_own_limit(file: Path) -> None:
    limit = csv.field_size_limit()
    file.write_text(f"question,answer\n{'x' * (limit + 1)},yes\n")
    assert len(opened(file).samples[0].prompt or "") == limit + 1
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("only one", "has 1 cell, the header has 2"),
        ("a,b,c", "has 3 cells, the header has 2"),
        ('"a"b,c', "not readable"),
        (",yes", "'question' is empty"),
        ("a,", "'answer' is empty"),
    ],
)
def test_a_ragged_or_broken_row_is_refused_or_skipped(file: Path, row: str, reason: str) -> None:
    file.write_text(f"question,answer\nfirst,yes\n{row}\nlast,no\n")
    with pytest.raises(RequestError, match=r"data.csv line 3: .*--skip-bad") as caught:
        opened(file)
    assert reason in str(caught.value)
    found = opened(file, skip_bad=True)
    assert [each.prompt for each in found.samples] == ["first", "last"]
    assert [record.place for record in found.bad] == ["data.csv line 3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; it needs a header line"),
        (b"question,answer\n", "has no records"),
        (b"question,answer,question\na,b,c\n", "names question more than once"),
        (b"How old?,3\nHow tall?,4\n", "no column for the prompt .*columns of data.csv are How old[?], 3"),
        (b"question,answer\ncaf\xe9,yes\n", "line 2: not UTF-8"),
    ],
)
def test_a_file_without_header_or_rows_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        opened(file)


def test_a_column_without_name_is_accepted(file: Path) -> None:
    file.write_text(",question,answer\n0,a,b\n")
    assert opened(file).samples[0].original == {"column 1": "0", "question": "a", "answer": "b"}


def test_lists_in_cells_are_json(file: Path) -> None:
    file.write_text('question,choices,answer\nWhich?,"[""red"", ""blue""]",blue\n')
    found = opened(file)
    assert found.samples[0].choices == ("red", "blue")
    assert found.samples[0].references == (1,)
