"""The Chinese pages have the commands, code and output of the English ones; only the sentences differ."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = DOCS / "coming-from" / "hand-made-scripts.md"
CHINESE_GUIDES = DOCS / "zh" / "coming-from.md"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """Fenced blocks with the comments for the tests before them."""
    return re.findall(r"(?:^<!-- [^\n]*-->\n)*^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of the tables that have one in every row."""
    return re.findall(r"^\| [^|]+ \| `((?:brim|torchrun) [^`]+)` \| [^|]+ \|$", text, flags=re.MULTILINE)


def guide_rows(text: str) -> list[str]:
    """The code of each row of a guide's tables; word order differs between languages, so it is sorted."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)
    return [" ".join(sorted(re.findall(r"`[^`]+`", " ".join(row)))) for row in rows]


def guides(text: str) -> dict[str, str]:
    """The guides by their number."""
    parts = re.split(r"^##+ (\d{3})[:：]", text, flags=re.MULTILINE)
    return {
        number: re.split(r"^##+ (?!Checklist)", part, flags=re.MULTILINE)[0]
        for number, part in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_get_started_has_the_same_blocks() -> None:
    chinese, english = blocks(read(DOCS / "zh" / "get-started.md")), blocks(read(DOCS / "get-started.md"))
    assert chinese == english
    assert len(chinese) > 10


def test_the_checklists_have_the_same_commands() -> None:
    assert commands(read(CHINESE_GUIDES)) == commands(read(GUIDES))
    assert len(commands(read(GUIDES))) > 40


def test_each_guide_has_the_same_rows() -> None:
    chinese, english = guides(read(CHINESE_GUIDES)), guides(read(GUIDES))
    assert list(chinese) == list(english) == ["000", "001", "002", "003", "004"]
    for number, text in english.items():
        assert guide_rows(chinese[number]) == guide_rows(text), number


def test_code_of_the_chinese_page_is_on_an_english_one() -> None:
    english = "".join(read(path) for path in sorted(GUIDES.parent.glob("*.md")))
    for block in blocks(read(CHINESE_GUIDES)):
        assert re.sub(r' title="[^"]*"', "", block) in re.sub(r' title="[^"]*"', "", english)
