"""The front door: exit codes, interrupts, tracebacks on request, and old spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brim import __version__
from brim.cli.main import dashed, run
from brim.errors import DoesNotFitError, LostError, RankError, RequestError

Brim = Callable[..., Any]


def test_the_version_is_printed(brim: Brim) -> None:
    assert brim("--version") == (0, f"brim {__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("find", "--help"), ("cache", "-h")])
def test_help_ends_with_zero(brim: Brim, arguments: tuple[str, ...]) -> None:
    result = brim(*arguments)
    assert result.code == 0
    assert "Usage" in result.out


def test_help_of_find_names_every_flag_of_the_interface(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = brim("find", "--help").out
    for flag in (
        "--mode", "--knob", "--max-tokens", "--batch-size", "--no-auto-batch-size", "--fail-on-oom", "--objective",
        "--memory-limit", "--margin", "--tolerance", "--max-probes", "--probe-timeout", "--multiple-of",
        "--power-of-two", "--no-cache", "--per-rank", "--isolate", "--device", "--dtype", "--torch-dtype",
        "--optimizer", "--gradient-checkpointing", "--output", "--json", "--trust-remote-code",
    ):  # fmt: skip
        assert flag in shown, flag


@pytest.mark.parametrize("arguments", [("fnid",), ("cache", "wipe"), ("--unknown",)])
def test_an_unknown_command_ends_with_two(brim: Brim, arguments: tuple[str, ...]) -> None:
    result = brim(*arguments)
    assert result.code == 2
    assert result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("fix it"), 2),
        (DoesNotFitError("too big"), 3),
        (LostError("gone"), 4),
        (RankError("rank 1: gone"), 4),
        (RankError("rank 1: fix it", exit_code=2), 2),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    brim: Brim, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr("brim.cli.find._search", fail)
    result = brim("find", "py:brim.models.small:convnet")
    assert (result.code, result.err) == (code, f"brim: {error}\n")


def test_an_interrupt_ends_with_130(brim: Brim, factories: str) -> None:
    result = brim("find", f"py:{factories}:interrupted", "--device", "cpu", "--memory-limit", "64KiB")
    assert result.code == 130
    assert "interrupted" in result.err
    assert "Traceback" not in result.err


def test_debug_lets_the_traceback_through(factories: str) -> None:
    with pytest.raises(RequestError, match="no checkpoint at step 7") as caught:
        run(["find", f"py:{factories}:broken", "--debug"])
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RequestError):
        run(["--debug", "find", f"py:{factories}:broken"])


def test_brackets_in_a_message_are_shown_as_they_are(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RequestError("write [red]x[/red] or brim[hf]")

    monkeypatch.setattr("brim.cli.find._search", fail)
    assert "write [red]x[/red] or brim[hf]" in brim("find", "py:a:b").err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--batch_size", "8"], ["--batch-size", "8"]),
        (["--memory_limit=1_000"], ["--memory-limit=1_000"]),
        (["--knob", "max_new_tokens=4"], ["--knob", "max_new_tokens=4"]),
        (["--", "--batch_size"], ["--", "--batch_size"]),
        (["-b", "my_file", "vit_base"], ["-b", "my_file", "vit_base"]),
    ],
)
def test_underscores_become_dashes_in_options_only(given: list[str], meant: list[str]) -> None:
    assert dashed(given) == meant
