"""`--settings FILE` and `--schema`, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.settings.commands import COMMANDS

Brim = Callable[..., Any]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_a_file_of_settings(brim: Brim, name: str) -> None:
    result = brim(*name.split(), "--settings", "absent.yaml")
    assert result.code == 2
    assert "absent.yaml: there is no such file" in result.err


def test_flags_come_before_the_file(brim: Brim, factories: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        f"model: 'py:{factories}:rows'\nmemory-limit: 64KiB\nmax_batch_size: 16\nno_cache: true\ndevice: cpu\n"
    )
    plan = json.loads(brim("find", "--settings", str(file), "--json").out)
    assert plan["batch_size_max"] <= 16
    fewer = json.loads(brim("find", "--settings", str(file), "--max-batch-size", "4", "--json").out)
    assert fewer["batch_size_max"] <= 4


def test_a_wrong_value_of_the_file_is_named_by_its_line(brim: Brim, factories: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("device: cpu\nbatch_size: 0\n")
    assert "s.yaml: batch_size (line 2): 0: it must be auto" in brim("find", "m", "--settings", str(file)).err
    named = brim("find", "m", "--settings", str(file), "-b", "none").err
    assert "--batch-size none: it must be auto" in named


def test_the_model_on_the_command_line_comes_before_that_of_the_file(brim: Brim, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("model: py:absent.py:first\ndata: questions.jsonl\n")
    result = brim("eval", "py:absent.py:second", "--settings", str(tmp_path / "s.yaml"))
    assert result.code == 2
    assert "second" in result.err or "questions.jsonl" in result.err
    assert "both name a model" not in result.err


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_the_schema_of_a_file_is_printed(brim: Brim, command: str) -> None:
    result = brim(command, "--schema")
    assert result.code == 0
    assert json.loads(result.out)["title"] == f"A file of brim {command}"
