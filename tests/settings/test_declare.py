"""A setting is declared once, and read alike from flags, from Python and from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest

from brim.errors import RequestError
from brim.settings.caller import called_by_flags, given, named, named_as, pair, resume_with, written
from brim.settings.commands import COMMANDS
from brim.settings.declare import (
    FromFile,
    NestedSettings,
    Setting,
    check_fields,
    declared,
    read_settings,
    read_settings_file,
)
from brim.settings.setting_checks import flag, pairs, size_or_none, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    limit: Annotated[int | None, Setting(help="At most.", check=whole(1))] = None
    use_cache: Annotated[bool, Setting(name="no_cache", help="No cache.", check=flag(), inverted=True)] = True
    seed: Annotated[int, Setting(help="Of noise.", check=whole(0))] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    model: Annotated[str, Setting(help="The model.", argument=True, missing="name one")]
    inner: Annotated[Inner, NestedSettings(without=("seed",))]
    size: Annotated[int | None, Setting(help="Size.", check=size_or_none(99), default="auto")] = None
    knob: Annotated[Mapping[str, Any], Setting(help="Knobs.", check=pairs("A=B"), many=True)] = dataclasses.field(
        default_factory=dict
    )


def test_what_is_given_is_read_and_the_rest_has_its_default() -> None:
    found = read_settings(Outer, {"model": "m", "limit": "3", "no_cache": True, "size": "auto", "knob": ["a=1"]})
    assert found == Outer(model="m", inner=Inner(limit=3, use_cache=False), knob={"a": "1"})
    assert read_settings(Outer, {"model": "m", "knob": {"a": 1}}).knob == {"a": 1}


def test_the_names_and_defaults_are_those_that_callers_write() -> None:
    shown = {one.name: one.default for one in declared(Outer)}
    assert shown == {"model": dataclasses.MISSING, "limit": None, "no_cache": False, "size": "auto", "knob": None}


@pytest.mark.parametrize(
    ("values", "in_python", "on_the_command_line"),
    [
        ({"limit": 0}, "limit=0: it must be", "--limit 0: it must be"),
        ({"size": "many"}, "size='many': it must be", "--size many: it must be"),
        ({"knob": ["a"]}, "knob='a': write it as A=B", "--knob a: write it as A=B"),
        ({"lmit": 3}, "lmit=: there is no such setting; did you mean limit", "--lmit: there is no such setting"),
        ({"seed": 3}, "seed=: there is no such", "--seed: there is no such"),
        ({"model": None}, "model= is missing: name one", "--model is missing: name one"),
    ],
)
def test_an_error_names_what_its_caller_wrote(values: dict[str, Any], in_python: str, on_the_command_line: str) -> None:
    everything = {name: value for name, value in {"model": "m", **values}.items() if value is not None}
    with pytest.raises(RequestError) as caught:
        read_settings(Outer, everything)
    assert str(caught.value).startswith(in_python)
    with pytest.raises(RequestError) as caught, called_by_flags():
        read_settings(Outer, everything)
    assert str(caught.value).startswith(on_the_command_line)


def test_a_value_of_a_file_is_named_by_its_line() -> None:
    with pytest.raises(RequestError) as caught, called_by_flags({"limit": "s.yaml: limit (line 7)"}):
        read_settings(Outer, {"model": "m", "limit": 0})
    assert str(caught.value).startswith("s.yaml: limit (line 7): 0: it must be")


def test_an_object_made_by_hand_is_checked_too() -> None:
    with pytest.raises(RequestError, match="limit=0"):
        Inner(limit=0)


def test_settings_are_named_in_the_words_of_the_caller() -> None:
    assert (named("a_b"), given("a_b", "x"), written("a_b", "N"), pair("a", "b", 1), resume_with("r")) == (
        "a_b=", "a_b='x'", "a_b=N", "a={'b': 1}", "resume=True, output='r'",
    )  # fmt: skip
    with called_by_flags():
        assert (named("a_b"), given("a_b", "x"), written("a_b", "N"), pair("a", "b", 1), resume_with("r")) == (
            "--a-b", "--a-b x", "--a-b N", "--a b=1", "--resume -o r",
        )  # fmt: skip
        assert given("a_b", True) == "--a-b"
        with named_as(a_b="section.key"):
            assert given("a_b", "x") == "section.key: x"
    assert named("a_b") == "a_b="


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_of_every_command_is_described(name: str) -> None:
    for one in declared(COMMANDS[name].declaration()):
        assert one.setting.help.endswith((".", ".)")), one.name
        assert one.name.isidentifier()
        if not one.switch and not one.setting.hidden and one.setting.only != "python":
            assert one.setting.metavar, one.name


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
