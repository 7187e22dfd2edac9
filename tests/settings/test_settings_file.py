"""`--settings FILE`: by the names of the flags, with the line of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.settings.commands import COMMANDS
from brim.settings.declare import declared
from brim.settings.settings_file import FromFile, read_settings_file


def read(tmp_path: Path, text: str, command: str = "eval") -> FromFile:
    file = tmp_path / "s.yaml"
    file.write_text(text, encoding="utf-8")
    return read_settings_file(str(file), declared(COMMANDS[command].declaration()))


def test_values_come_as_flags_would_give_them(tmp_path: Path) -> None:
    text = "batch-size: 8\nmax_tokens: 4\nmetrics: [bleu, rouge]\nknob: {max_crops: 4}\n"
    text += "no-chat: true\npin_memory: false\nlimit:\n"
    values, lines = read(tmp_path, text)
    assert values == {
        "batch_size": "8", "max_tokens": "4", "metrics": "bleu,rouge", "knob": ["max_crops=4"], "chat": False,
        "pin_memory": False,
    }  # fmt: skip
    assert lines["max_tokens"] == "s.yaml: max_tokens (line 2)"


def test_a_range_of_a_knob_is_written_as_on_the_command_line(tmp_path: Path) -> None:
    values, _ = read(tmp_path, "knob: {max_crops: 2-13, tokens: [8, 16], size: }\n", "profile")
    assert values["knob"] == ["max_crops=2-13", "tokens=8,16", "size"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize: 8\n", ["s.yaml:1: error: batchsize: there is no such setting", "did you mean batch_size"]),
        ("seed: 1\nbatch_size: 8\nbatch-size: 4\n", ["s.yaml:3", "batch_size is given twice"]),
        ("skip_bad: 7\n", ["s.yaml:1", "skip_bad: 7: it must be true or false"]),
        ("weights: {a: 1}\n", ["s.yaml:1", "one value"]),
        ("step: x\n", ["there is no such setting"]),
        ("[1, 2]\n", ["write KEY: VALUE lines"]),
    ],
)
def test_what_is_wrong_has_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
