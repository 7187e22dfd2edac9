"""Completion in the shell: typer's scripts, which ask `brim` itself for commands, flags and values.

    eval "$(brim --show-completion bash)"

The values of a flag come from its declaration (`values_of`), so completing loads no torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from brim.errors import RequestError, nearest_names

__all__ = ["answer_shells", "completion_script", "install_completion", "values_of", "with_shell"]

PROGRAM, VARIABLE = "brim", "_BRIM_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
FLAGS = ("--show-completion", "--install-completion")


def with_shell(words: list[str]) -> list[str]:
    """The flags of completion with the user's shell behind them, where none is named."""
    if words and words[-1] in FLAGS:
        return [*words, PurePath(os.environ.get("SHELL", "")).name or "bash"]
    return words


def answer_shells() -> None:
    """Let typer answer the scripts, where one of them has started this process."""
    if VARIABLE in os.environ:
        _typer().completion_init()


def completion_script(shell: str) -> str:
    """What a shell reads to complete `brim`."""
    script: str = _typer().get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=_known(shell))
    return script


def install_completion(shell: str) -> str:
    """Write the script where the shell looks for it; says where that is."""
    _, path = _typer().install(shell=_known(shell), prog_name=PROGRAM, complete_var=VARIABLE)
    return f"completion for {shell} is in {path}; it works in the next terminal"


def values_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """The words that a setting takes, where its check has a list of them."""
    words = list(schema.get("enum", ()))
    for kind in schema.get("anyOf", ()):
        words += kind.get("enum", ())
    return [word for word in words if isinstance(word, str)]


def _typer() -> Any:
    return importlib.import_module("typer.completion")  # whose names are not declared as public


def _known(shell: str) -> str:
    if shell not in SHELLS:
        raise RequestError(
            f"there is no completion for {shell}; give bash, zsh, fish or powershell{nearest_names(shell, SHELLS)}"
        )
    return shell
