"""docs/troubleshooting.md has an entry for every error and note that brim prints, and none for what it does not print.

How it works: `messages.py` reads every message from the source, with `…` for what is filled in. An entry of the page is
a text in backticks in the first cell of a table: the start of a message, with `…` for any text up to a semicolon, so
that one entry can cover a family of messages. One that begins with `…: ` also covers what the checks of settings say of
a value, since brim prints the setting and its value before it. When this test names a message, add an entry to the row
whose advice fits, or a row; when it names an entry, delete or correct it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.messages import ANY, Message, Source, says_enough

_NO_SEMICOLON = "(?:(?!; ).)*"
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def entries(text: str) -> list[str]:
    """The texts in backticks of the first cells."""
    cells = re.findall(r"^\| (`.+?`) \| ", text, flags=re.MULTILINE)
    return [entry for cell in cells for entry in re.findall(r"`([^`]+)`", cell)]


def pattern_of(entry: str) -> re.Pattern[str]:
    """What the messages of an entry begin with."""
    name = f"{ANY}: "
    optional = f"(?:{_NO_SEMICOLON}: )?" if entry.startswith(name) else ""
    parts = entry.removeprefix(name).split(ANY) if optional else entry.split(ANY)
    return re.compile(optional + _NO_SEMICOLON.join(map(re.escape, parts)))


def without_entry(messages: list[Message], listed: list[str]) -> list[Message]:
    patterns = [pattern_of(entry) for entry in listed]
    return [message for message in messages if not any(pattern.match(message.text) for pattern in patterns)]


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return Source().messages()


@pytest.fixture(scope="module")
def listed() -> list[str]:
    return entries(PAGE.read_text(encoding="utf-8"))


def test_every_message_has_an_entry(messages: list[Message], listed: list[str]) -> None:
    missing = without_entry(messages, listed)
    assert not missing, "\n".join(
        ["docs/troubleshooting.md has no entry for:", *(f"{at}  {text}" for text, at in missing)]
    )


def test_every_entry_is_of_a_message(messages: list[Message], listed: list[str]) -> None:
    unused = [entry for entry in listed if not any(pattern_of(entry).match(message.text) for message in messages)]
    assert not unused, "\n".join(["brim prints nothing that begins with:", *unused])


def test_no_entry_covers_everything(listed: list[str]) -> None:
    """Each has two words of its own, or begins with the name of a key or a thing."""
    assert not [entry for entry in listed if not says_enough(entry) and not re.match(r"[\w.-]{5,}", entry)]


def test_no_entry_stands_twice(listed: list[str]) -> None:
    assert len(listed) == len(set(listed))


CODE = """
from brim.errors import RequestError

WHY = "the moon is not full"

def first(name):
    raise RequestError(f"{name}: a new kind of trouble; do that")

def _refused(name, why):
    return RequestError(f"{name}: {why}")

def second(name, listener, notes):
    if name:
        raise _refused(name, "it has never been seen before")
    notes.append(f"{name} runs without a belt")
    listener.note(f"{name}: {WHY}")
    raise RequestError(str(listener))
"""


def test_a_new_message_is_found_and_has_no_entry(tmp_path: Path, listed: list[str]) -> None:
    (tmp_path / "new.py").write_text(CODE, encoding="utf-8")
    found = Source(tmp_path).messages()
    assert {message.text for message in found} == {
        "…: a new kind of trouble; do that",
        "…: it has never been seen before",
        "… runs without a belt",
        "…: the moon is not full",
    }
    assert without_entry(found, listed) == found


def test_an_entry_covers_what_begins_with_it() -> None:
    assert pattern_of("…: it must be").match("--batch-size 0: it must be at least 1")
    assert pattern_of("…: it must be").match("it must be a text")
    assert pattern_of("image … cannot be read").match("image … cannot be read: …")
    assert not pattern_of("image … cannot be read").match("the image … cannot be read")
