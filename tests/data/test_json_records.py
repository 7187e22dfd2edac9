from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from brim.errors import RequestError
from tests.data.media_files import opened, write_lines

pytestmark = pytest.mark.usefixtures("words_of_the_command_line")

QA = [{"question": "Is it red?", "answer": "yes"}, {"question": "How many?", "answer": "2"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def test_a_record_becomes_a_sample(file: Path) -> None:
    found = opened(write_lines(file, *QA))
    assert (found.name, found.format, found.suggested_task, found.bad) == ("data.jsonl", "jsonl", "generate", ())
    assert [(each.id, each.prompt, each.references) for each in found.samples] == [
        ("1", "Is it red?", ("yes",)),
        ("2", "How many?", ("2",)),
    ]
    assert found.samples[1].original == QA[1]
    assert found.fields == {"prompt": "question", "reference": "answer"}


@pytest.mark.parametrize(
    "name", ["data.ndjson", "data.jsonl.gz", "DATA.JSONL", "lines.json", "list.json", "inner.json"]
)
def test_every_way_to_write_json_records_gives_the_same_samples(tmp_path: Path, name: str) -> None:
    text = "\n".join(json.dumps(record) for record in QA)
    if name == "list.json":
        text = json.dumps(QA, indent=2)
    elif name == "inner.json":
        text = json.dumps({"version": 1, "data": QA})
    content = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(content)
    assert [each.references for each in opened(tmp_path / name).samples] == [("yes",), ("2",)]


def test_a_byte_order_mark_crlf_and_blank_lines_are_no_part_of_the_data(file: Path) -> None:
    lines = [json.dumps(QA[0]), "", "   ", json.dumps(QA[1]), ""]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found = opened(file)
    assert [each.original for each in found.samples] == QA
    assert [each.id for each in found.samples] == ["1", "4"]  # the numbers of the lines


def test_a_line_separator_inside_a_text_does_not_end_the_line(file: Path) -> None:
    text = "first\u2028second\u2029third\x85fourth\x0bfifth"
    record = {"question": text, "answer": "yes"}
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n" + json.dumps(QA[0]) + "\n", encoding="utf-8")
    found = opened(file)
    assert [each.prompt for each in found.samples] == [text, "Is it red?"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "a", "answer": ', "not JSON: Expecting value at column"),
        (b'{"question": "a\tb", "answer": "c"}', "not JSON: Invalid control character at column"),
        (b"[1, 2]", "holds a list, not an object"),
        (b'"text"', "holds a text, not an object"),
        (b"3", "holds a number, not an object"),
        (b'{"question": "\xff", "answer": "b"}', "not UTF-8"),
        (b'{"question": "\\ud83d", "answer": "b"}', "half of a surrogate pair"),
        (b"[" * 100_000, "not"),
    ],
)
def test_a_broken_line_is_refused_or_skipped(file: Path, line: bytes, reason: str) -> None:
    good = [json.dumps(record).encode() for record in QA]
    file.write_bytes(b"\n".join([good[0], line, good[1]]))
    with pytest.raises(RequestError, match=r"data.jsonl line 2: .*add --skip-bad to leave such records out") as caught:
        opened(file)
    assert reason in str(caught.value)
    found = opened(file, skip_bad=True)
    assert [each.id for each in found.samples] == ["1", "3"]
    assert [record.place for record in found.bad] == ["data.jsonl line 2"]
    assert reason in found.bad[0].reason


def test_a_whole_surrogate_pair_is_a_character(file: Path) -> None:
    file.write_bytes(b'{"question": "\\ud83d\\ude00", "answer": "b"}')
    assert opened(file).samples[0].prompt == "😀"


def test_the_number_of_broken_lines_is_reported(file: Path) -> None:
    file.write_bytes(json.dumps(QA[0]).encode() + b"\n{\n{\n")
    with pytest.raises(RequestError, match=r"line 2: .*; 2 records of data.jsonl cannot be read; "):
        opened(file)


def test_a_file_of_only_broken_lines_is_refused_even_with_skip_bad(file: Path) -> None:
    file.write_bytes(b"{\n{\n")
    with pytest.raises(
        RequestError, match=r"none of its 2 records can be read; the first, data.jsonl line 1: not JSON"
    ):
        opened(file, skip_bad=True)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(RequestError, match=r"data.jsonl.*(is empty|has no records)"):
        opened(file)


def test_utf_16_is_refused(file: Path) -> None:
    file.write_text(json.dumps(QA[0]), encoding="utf-16")
    with pytest.raises(RequestError, match="UTF-16; save it as UTF-8"):
        opened(file)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(json.dumps(record) for record in QA).encode())
    for name, content in (("cut.jsonl.gz", whole[:-12]), ("plain.jsonl.gz", b"{}")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=f"{name} is not a complete gzip file"):
            opened(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": []}', "holds an object with the keys rows; brim reads a list of objects"),
        ("{}", "an object with no keys"),
        ("3", "holds a number"),
        ('[{"question": ', "is not JSON"),
        ("[]", "has no records"),
    ],
)
def test_a_json_document_without_records_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(RequestError, match=message):
        opened(tmp_path / "data.json")


def test_a_record_of_a_document_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([QA[0], "stray"]))
    with pytest.raises(RequestError, match=r"data.json record 2: holds a text"):
        opened(tmp_path / "data.json")


def test_a_hundred_thousand_lines_open(file: Path) -> None:
    line = json.dumps({"question": "How many apples are there?" * 4, "answer": "2", "category": "count"}) + "\n"
    file.write_text(line * 100_000)
    found = opened(file, limit=10)
    assert len(found.samples) == 10
    assert found.samples[0].id == "5001"
