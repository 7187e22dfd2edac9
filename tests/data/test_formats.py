from __future__ import annotations

from pathlib import Path

from brim.data.base import TableFormat
from brim.data.formats import FORMATS, readable_formats
from brim.training.data_sets import FORMATS as TRAINING_FORMATS

ROOT = Path(__file__).parents[2]


def test_formats_have_distinct_names_and_suffixes() -> None:
    assert len({each.name for each in FORMATS}) == len({each.title for each in FORMATS}) == len(FORMATS)
    tables = [each for each in FORMATS if isinstance(each, TableFormat)]
    suffixes = [suffix for each in tables for suffix in (*each.suffixes, *each.document_suffixes)]
    assert len(set(suffixes)) == len(suffixes)


def test_interface_page_lists_every_format() -> None:
    rows = (ROOT / "docs" / "interface.md").read_text(encoding="utf-8").splitlines()
    assert f"| `-d`, `--data PATH` | {readable_formats()} |" in rows


def test_training_accepts_every_format_by_name() -> None:
    assert {each.name for each in FORMATS} <= set(TRAINING_FORMATS)
