"""Completion in the shell, as its scripts ask for it: commands, flags, values; and the scripts in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Brim


def completed(brim: Brim, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_BRIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    result = brim()
    assert (result.code, result.err) == (0, "")
    return result.out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("brim e", ["eval", "encode"]),
        ("brim do", ["doctor"]),
        ("brim cache ", ["list", "clear"]),
        ("brim eval --d", ["--data", "--device", "--dtype"]),
        ("brim eval --json --dt", ["--dtype"]),
        ("brim eval --dtype ", ["auto", "float32", "float16", "bfloat16"]),
        ("brim eval --dtype b", ["bfloat16"]),
        ("brim find resnet50 --objective ", ["fastest", "largest"]),
        ("brim train config.yaml --lr-scale s", ["sqrt"]),
        ("brim eval --log t", ["tensorboard"]),
        ("brim eval --settings missing.yaml --dt", ["--dtype"]),  # a file is not read while a line is typed
        ("brim eval -d ", []),  # bash then offers files
    ],
)
def test_bash_is_offered(brim: Brim, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]) -> None:
    assert completed(brim, monkeypatch, line) == offered


def test_every_command_is_offered_and_has_flags(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = completed(brim, monkeypatch, "brim ")
    assert {"find", "eval", "watch", "doctor", "cache"} <= set(commands)
    for command in commands:
        if command != "cache":
            assert "--settings" in completed(brim, monkeypatch, f"brim {command} --"), command


def test_zsh_is_offered_values_and_flags_with_their_help(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_BRIM_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "brim eval --dtype b")
    assert brim().out == "_arguments '*: :((\"bfloat16\"))'\n"
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "brim eval --dt")
    assert '"--dtype":"auto, float32, float16 or bfloat16' in brim().out
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "brim eval -d data/")
    assert brim().out == "_files\n"


def test_the_script_completes_in_a_real_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = tmp_path / "brim"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m brim "$@"\n')
    program.chmod(0o755)
    script = """
        source <(brim --show-completion bash)
        COMP_WORDS=(brim eval --dtype b); COMP_CWORD=3
        _brim_completion brim
        echo "${COMPREPLY[@]}"
        complete -p brim
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "--norc", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout == "bfloat16\ncomplete -o default -F _brim_completion brim\n"


def test_the_script_is_of_the_shell_that_is_asked_for_or_in_use(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert brim("--show-completion").out.startswith("complete --command brim")
    assert brim("--show-completion", "zsh").out.startswith("#compdef brim")
    refused = brim("--show-completion", "tcsh")
    assert refused.code == 2
    assert "there is no completion for tcsh; give bash, zsh" in refused.err


def test_it_is_installed_in_the_home_folder(brim: Brim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = brim("--install-completion", "bash")
    script = tmp_path / ".bash_completions" / "brim.sh"
    assert result.code == 0
    assert str(script) in result.out
    assert "_BRIM_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
