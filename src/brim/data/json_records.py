"""JSON records: one object per line (`.jsonl`, `.ndjson`), or one document with a list of objects (`.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from brim.data.base import BadRecord, BadRowError, Row, Table, TableFormat, columns_of
from brim.data.files import BYTE_ORDER_MARK, decoded, inner_suffix, lines_of, text_digest
from brim.data.selection import without_splits
from brim.errors import RequestError

__all__ = ["JSON_RECORDS", "read_json_records"]


def read_json_records(path: Path) -> Table:
    """The records of a `.jsonl`, `.ndjson` or `.json` file, also with `.gz`; broken ones are in `bad`."""
    lines = list(lines_of(path))
    if not any(line.strip() for line in lines):
        raise RequestError(f"{path} is empty; it should hold one JSON object per line")
    content = {"sha256": text_digest(lines)}
    lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
    if inner_suffix(path) == ".json" and not _is_lines(lines):
        records = list(_document_records(path, b"".join(lines)))
    else:
        records = list(_line_records(path, lines))
    rows = tuple(record for record in records if isinstance(record, Row))
    return Table(
        name=path.name,
        format="jsonl",
        folder=path.parent,
        columns=columns_of(rows),
        rows=rows,
        bad=tuple(record for record in records if isinstance(record, BadRecord)),
        content=content,
    )


def _line_records(path: Path, lines: Iterable[bytes]) -> Iterator[Row | BadRecord]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path.name} line {number}"
        try:
            yield Row(place=place, number=number, values=_record(_parsed(line)))
        except BadRowError as error:
            yield BadRecord(place=place, reason=str(error))


def _document_records(path: Path, content: bytes) -> Iterator[Row | BadRecord]:
    text = decoded(content, path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}; write a list of objects, or one object per line") from error
    records = document.get("data") if isinstance(document, dict) else document
    if not isinstance(records, list):
        found = f"an object with {_listed(document)}" if isinstance(document, dict) else _kind(document)
        raise RequestError(f'{path} holds {found}; brim reads a list of objects, or {{"data": [...]}}')
    for number, record in enumerate(records, start=1):
        place = f"{path.name} record {number}"
        try:
            yield Row(place=place, number=number, values=_record(record))
        except BadRowError as error:
            yield BadRecord(place=place, reason=str(error))


def _is_lines(lines: list[bytes]) -> bool:
    """Whether a `.json` file has one object per line, as many tools write it."""
    filled = [line for line in lines[:1000] if line.strip()]
    try:
        return len(filled) > 1 and all(isinstance(_parsed(line), dict) for line in filled[:2])
    except BadRowError:
        return False


def _parsed(line: bytes) -> Any:
    try:
        value = json.loads(line.decode())
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair cannot be encoded
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise BadRowError("a text holds half of a surrogate pair (a character that was cut in two)") from error
    except json.JSONDecodeError as error:
        raise BadRowError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise BadRowError(f"not readable: {error}") from error
    return value


def _record(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError(f"holds {_kind(value)}, not an object")
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


def _listed(document: dict[str, Any]) -> str:
    return "the keys " + ", ".join(document) if document else "no keys"


JSON_RECORDS = TableFormat(
    name="jsonl",
    title="JSONL",
    suffixes=(".jsonl", ".ndjson"),
    document_suffixes=(".json",),
    read=without_splits(read_json_records),
)
