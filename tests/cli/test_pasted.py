"""Lines of the guides (coming-from/hand-made-scripts.md), pasted: flags work or are answered, lists may have spaces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from brim.cli.main import app
from brim.cli.pasted import LISTS, OLD_FLAGS, VALUE, ListFlag, OldFlag, rewritten
from brim.errors import RequestError
from tests.fuzzed_lines import commands

Brim = Callable[..., Any]


def declared(command: str) -> set[str]:
    return {name for option in commands()[command] for name in option.names}


def parsed(line: str) -> Any:
    """The values of the options and arguments of a line; a line that is refused raises."""
    words = rewritten(line.split())
    command: Any = typer.main.get_command(app)
    command.build_all()
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    return command.make_context("brim", words).params


OLD = [pytest.param(row, command, id=f"{command} {row.name}") for row in OLD_FLAGS for command in row.commands]
SPACED = [
    pytest.param(row, command, name, id=f"{command} {name}")
    for row in LISTS
    for command in row.commands
    for name in row.names
]


@pytest.mark.parametrize(("row", "command"), OLD)
def test_an_old_flag_becomes_flags_that_the_command_has_or_is_answered(row: OldFlag, command: str) -> None:
    old = row.name.replace("-", "_").replace("__", "--", 1)
    if row.answer:
        with pytest.raises(RequestError, match=rf"{row.name}: .*(-d|torchrun|leave it out)"):
            rewritten([*command.split(), old, "8"])
        return
    value = ["12"] if VALUE in row.becomes else []
    words = rewritten([*command.split(), old, *value, "--json"])
    meant = ["12" if part == VALUE else part for part in row.becomes]
    assert words == [*command.split(), *meant, "--json"]
    assert {word for word in row.becomes if word.startswith("-")} <= declared(command)
    assert row.name not in declared(command)
    if value:
        assert rewritten([*command.split(), f"{old}=12"]) == [*command.split(), *meant]


@pytest.mark.parametrize(("row", "command", "name"), SPACED)
def test_values_may_be_separated_by_spaces(row: ListFlag, command: str, name: str) -> None:
    assert name in declared(command)
    values = ["a=1", "b=2"] if name in ("--knob", "--map") else ["bleu", "rouge"] if name == "--metrics" else ["1", "2"]
    words = rewritten([*command.split(), name, *values, "--json"])
    meant = [part for value in values for part in (name, value)] if row.repeated else [name, ",".join(values)]
    assert words == [*command.split(), *meant, "--json"]
    if not row.repeated:
        assert rewritten([*command.split(), name, f"{values[0]},", values[1]]) == [*command.split(), *meant]


@pytest.mark.parametrize(
    "line",
    [
        "eval --metrics bleu rouge my-model -d x.jsonl",
        "eval --compare-batch 1 2 4 my-model -d x.jsonl",
        "profile --knob max_crops --values 12 13 my-model -d x.jsonl",
        "find --knob frames=16 size=224 my-model",
        "train --seeds 3 5 8 my-model hp.epochs=3",
        "train --compare-batch 512 2048 my-model",
    ],
)
def test_a_list_leaves_the_model_and_the_file_alone(line: str) -> None:
    values = parsed(line)
    assert values.get("model", values.get("config")) == "my-model"
    assert list(values.get("overrides") or []) in ([], ["hp.epochs=3"])


def test_with_a_model_by_flag_every_word_is_a_metric() -> None:
    assert parsed("eval -m my-model -d x --plugin mine.py --metrics bleu mine")["metrics"] == "bleu,mine"


@pytest.mark.parametrize(
    "line",
    [
        "profile -m M -d D --batch_size 64 --start_from_max_crops 12 --auto_adjust_batch_size",
        "profile -m M -d D --batch_size 64 --max_crops_list 12 13 --auto_adjust_batch_size",
        "profile -m M -d D --batch_size 32 --no_auto_adjust_batch_size --knob max_crops",
        "profile -m M -d D --max_new_tokens 16 --num_workers 4 --pin_memory --prefetch_factor 2 --output_dir out",
        "train dpo --data a.json b.json c.json --encoder minimol unimol --batch_size 2048 --eval_batch_size 512",
        "train config.yaml --gradient_checkpointing --batch_size 8192 --eval_batch_size 4096",
        "eval -m M -d D -b 8 -o out --torch-dtype float16 --max-tokens 256 --device cpu --temperature 0 --top-p 1",
        "eval -m M -d D --batch-size 8 --metrics bleu rouge exact_match --save-predictions --verbose",
        "sweep --config grid.yaml --max_experiments 3 --results_file r.csv --top_n 5 --data_percentage 10 --multi_gpu",
    ],
)
def test_lines_of_the_guides_are_understood(line: str) -> None:
    assert parsed(line)


def test_every_flag_of_the_guides_is_declared_or_in_the_table() -> None:
    """As the guides write them, in the column of what people have."""
    guide = (
        (Path(__file__).parents[2] / "docs" / "coming-from" / "hand-made-scripts.md")
        .read_text(encoding="utf-8")
        .split("## What was done by hand")[0]
    )
    there = " ".join(line.split("|")[1] for line in guide.splitlines() if line.startswith("| ") and "|" in line[2:])
    known = {name for options in commands().values() for option in options for name in option.names}
    used = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", there)}
    assert len(used) > 15
    assert used <= known | {row.name for row in OLD_FLAGS}


def test_an_old_flag_on_another_command_says_where_it_belongs(brim: Brim) -> None:
    result = brim("eval", "--start_from_max_crops", "12")
    assert result.code == 2
    assert "brim profile" in result.err
    assert "--start-from" in result.err


def test_two_old_flags_of_one_knob_name_it_once() -> None:
    words = rewritten(["profile", "--max_crops_list", "12", "13", "--start_from_max_crops", "13"])
    assert words == ["profile", "--knob", "max_crops", "--values", "12,13", "--start-from", "13"]


def test_an_old_flag_without_its_value_says_what_it_is_called(brim: Brim) -> None:
    result = brim("profile", "--max_crops_list")
    assert result.code == 2
    assert "--values" in result.err


def test_what_follows_two_dashes_is_left_alone() -> None:
    assert rewritten(["find", "--", "--max_crops_list", "1", "2"]) == ["find", "--", "--max_crops_list", "1", "2"]


def test_the_pasted_command_of_the_first_guide_profiles(brim: Brim, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def m(max_crops: int = 4):\n    return lambda samples: ['yes' for _ in samples]\n")
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "a?", "answer": "yes"}) + "\n")
    result = brim(
        "profile", "-m", f"py:{tmp_path / 'm.py'}:m", "-d", str(tmp_path / "d.jsonl"), "--batch_size", "64",
        "--start_from_max_crops", "13", "--max_crops_list", "12", "13", "--auto_adjust_batch_size", "--device", "cpu",
        "--metrics", "exact_match", "--latency-samples", "0", "--output_dir", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert [entry["max_crops"] for entry in json.loads(result.out)["summary"]] == [13]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("find --zzzz", ["--zzzz", "Possible options: --"]),
        ("find --metrics bleu", ["--metrics", "brim eval", "Possible options: --"]),
        ("train config.yaml --epochs 3", ["--epochs", "hp.epochs=VALUE"]),
        ("eval --modle x", ["--modle", "--model"]),
        ("cache list --jsno", ["--json"]),
        ("--model x eval", ["--model", "after the command"]),
        ("find MODEL DATA", ["DATA", "-d PATH"]),
    ],
)
def test_an_unknown_option_or_argument_is_answered_with_what_to_write(brim: Brim, line: str, words: list[str]) -> None:
    result = brim(*line.split())
    shown = " ".join(result.err.replace("│", " ").split())
    assert result.code == 2
    assert all(word in shown for word in words), shown
