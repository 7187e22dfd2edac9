"""Tables of the pages: every row below a header, with as many cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RULE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")


def cells(row: str) -> int:
    return len(row.replace(r"\|", "").strip().strip("|").split("|"))


def faults(text: str) -> list[str]:
    """Rows that no renderer puts into a table, or that lack cells; code is no table."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for block in re.split(r"\n(?! *\|)", text):  # a line, with the rows below it
        rows = [line.strip() for line in block.splitlines() if line.strip().startswith("|")]
        if rows and (len(rows) < 2 or not RULE.fullmatch(rows[1])):
            found.append(f"no header above: {rows[0]}")
        found += [f"other than {cells(rows[0])} cells: {row}" for row in rows if cells(row) != cells(rows[0])]
    return found


def test_a_row_that_is_cut_off_or_too_short_is_found() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert faults(f"A table.\n\n{table}") == faults(f"```\n| 1 |\n```\n{table}") == []
    assert faults(f"{table}\n| 3 | 4 |\n") == ["no header above: | 3 | 4 |"]
    assert faults(f"{table}| 3 |\n") == ["other than 2 cells: | 3 |"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rows_belong_to_a_table(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []
