"""Commands that the tests do not run, checked without running: flags exist, values are accepted, files are there."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import shlex
import tomllib
from functools import cache

import typer

from brim.cli.adapter import build_command
from brim.cli.pasted import rewritten
from brim.errors import BrimError
from brim.settings.caller import called_by_flags
from brim.settings.commands import COMMANDS
from tests.docs.blocks import ROOT

_NOT_RUN = ("make", "pip", "git", "source", "deactivate")  # they set a machine up
_SEPARATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "(", ")"}


def is_checked_only(text: str) -> bool:
    """Whether a command sets the machine up: `make demo`, `pip install`."""
    return all(words[0] in _NOT_RUN or words[:3] == ["python", "-m", "pip"] for words in _simple_commands(text))


def check_command(text: str) -> str:
    """What is wrong with the commands of a line, or nothing."""
    problems = [problem for words in _simple_commands(text) if (problem := _problem(words))]
    return "\n".join(problems)


def _simple_commands(text: str) -> list[list[str]]:
    """The words of each command in a line, without variables before it and without what a launcher takes."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.wordchars += "{}[]…$=,:@%^!~"
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in _SEPARATORS:
            found.append([])
        else:
            found[-1].append(word)
    commands = []
    for words in found:
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            commands.append(words)
    return commands


def _problem(words: list[str]) -> str:
    program = words[0].rpartition("/")[2]
    if "brim" in words and (program in ("brim", "torchrun", "srun", "mpirun", "timeout", "time") or "-m" in words):
        return _brim_problem(words[words.index("brim") + 1 :])
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
        missing = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
        return f"make has no target {missing[0]}" if missing else ""
    if program == "pip" or words[1:3] == ["-m", "pip"]:
        return _extras_problem(" ".join(words))
    if program.startswith("python"):
        return _script_problem(words[1:])
    return ""


def _brim_problem(words: list[str]) -> str:
    """Through the command's own parser and the checks of its settings, up to where it would run."""
    if any(word in ("…", "...") for word in words):
        words = [word for word in words if word not in ("…", "...")]
        return "" if words and words[0] in COMMANDS else f"brim has no command {' '.join(words[:1])}"
    try:
        with called_by_flags(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            words = rewritten([word for word in words if word != "--debug"])
            if not words or words[0].startswith("-"):
                return ""
            name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
            if name not in COMMANDS:
                return f"brim has no command {name}"
            build_command(COMMANDS[name], lambda settings: None)(
                args=words[len(name.split()) :], prog_name=f"brim {name}", standalone_mode=False
            )
    except typer.Exit:
        return ""
    except BrimError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ""  # a file of the reader's
        return f"brim {' '.join(words)}: {error}"
    except Exception as error:  # typer has no public name for the kind of a wrong flag
        if hasattr(error, "format_message"):
            return f"brim {' '.join(words)}: {error.format_message()}"
        raise
    return ""


def _extras_problem(text: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra.strip() for group in re.findall(r"(?:brim|\.)\[([^\]]*)\]", text) for extra in group.split(",")}
    unknown = sorted(named - {*project["optional-dependencies"], "EXTRA"})
    return f"brim has no extra {unknown[0]}" if unknown else ""


def _script_problem(words: list[str]) -> str:
    """A script of this repository: it exists, and its help has the flags."""
    if words[:1] == ["-m"]:
        if not (ROOT / words[1].partition(".")[0]).is_dir():
            return ""  # a library's own
        script = ROOT / words[1].replace(".", "/")
        script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
        rest = words[2:]
    else:
        script, rest = ROOT / words[0] if words else ROOT, words[1:]
    if words[:1] == ["-c"] or not words or not script.is_relative_to(ROOT):
        return ""
    if not script.exists():
        return f"there is no {script.relative_to(ROOT)}"
    if not script.is_relative_to(ROOT / "benchmarks"):
        return ""
    name = script.relative_to(ROOT).as_posix()
    known = _options(name)
    for word, value in itertools.zip_longest(rest, rest[1:], fillvalue=""):
        if not word.startswith("-") or word == "-":
            continue
        if word.partition("=")[0] not in known:
            return f"{name} has no option {word}"
        choices = known[word.partition("=")[0]]
        if choices and value not in choices:
            return f"{name} {word} {value}: choose from {', '.join(choices)}"
    return ""


@cache
def _options(script: str) -> dict[str, tuple[str, ...]]:
    """The flags of a benchmark and their choices, from its source: its help would import torch and the peers."""
    found: dict[str, tuple[str, ...]] = {"-h": (), "--help": ()}
    for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            given = [one.value for one in node.keywords if one.arg == "choices" and isinstance(one.value, ast.Tuple)]
            choices = tuple(ast.literal_eval(given[0])) if given else ()
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found |= {name: choices for name in names if name.startswith("-")}
    return found
