"""Plain words: none of the words that the project has replaced is left in what users read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import brim
from brim.settings.commands import COMMANDS
from brim.settings.declare import declared
from tests.docs.blocks import ROOT

# What was replaced, and by what.
REPLACED = {
    r"\bdear(?:er|est)?\b": "costliest, cost",
    r"\b(?:told|tells?)\b(?!(?: \w+){0,5} apart)|say aloud|that is said": "log, note, report, warn",
    r"\b(?:came|comes|come) to\b": "result, total, is",
    r"\b(?:goes|go|went|going) on\b": "continue, resume",
    r"what (?:a|the) batch took": "memory used, peak bytes",
    r"\blooks at\b|\ba look\b": "measures, trial, probe",
    r"locked rooms?|SharedRoom": "PinnedSharedPool",
    r"asks nothing of anyone": "no-op",
    r"stands inside of": "refers to",
    r"\b(?:Scene|Governor|Ghost|Scout|Surroundings|HeldOut)\b": "ProbeContext, Sizer, ShapeTensor, ForecastProcess, …",
}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def hits(text: str) -> list[str]:
    """Every replaced word in a text, with some of the text around it."""
    return [
        f"…{text[max(found.start() - 30, 0) : found.end() + 30]!r}… → {better}"
        for words, better in REPLACED.items()
        for found in re.finditer(words, text, flags=0 if words.startswith(r"\b(?:Scene") else re.IGNORECASE)
    ]


def test_a_replaced_word_is_found() -> None:
    assert len(hits("The dearest item goes on; it looks at a Scene, and the scene stays.")) == 4
    assert (
        hits("The costliest item continues; going once, ongoing, a foretold tale that bookmarks come together.") == []
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_plain_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert hits(re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)) == []


def help_texts() -> Iterator[str]:
    for command in COMMANDS.values():
        yield from (command.summary, command.more)
        for one in declared(command.declaration()):
            yield from (one.setting.help, one.setting.python_help)


def test_help_texts_use_plain_words() -> None:
    assert [hit for text in help_texts() for hit in hits(text or "")] == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in Path(brim.__file__).parent.rglob("*.py")}),
                         ids=lambda folder: folder.name)  # fmt: skip
def test_messages_use_plain_words(folder: Path) -> None:
    """Every string of the package that is more than a name, docstrings too."""
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found += [f"{path.name}:{node.lineno}: {hit}" for hit in hits(node.value)]
    assert found == []
