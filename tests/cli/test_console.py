"""Text from outside is shown and never obeyed: no command passes an escape sequence on to the terminal."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.cli.main import run
from brim.errors import RequestError
from tests.sweeps.sweep_runs import FakeLauncher, failed

Brim = Callable[..., Any]

# A title for the terminal's window, a bell, a colour, "clear the screen" in one C1 character, an override of the text's
# direction, and rich's markup.
HOSTILE = "\x1b]0;pwned\x07\x1b[31m\x9b2J\u202e[red]:fire:[/]"
SHOWN = r"\x1b]0;pwned\x07\x1b[31m\x9b2J\u202e[red]:fire:[/]"

MODELS = f"""
def shout():
    return lambda samples: [sample.prompt.upper() for sample in samples]

def broken():
    def answer(samples):
        raise ValueError({HOSTILE!r})
    return answer
"""


def harmless(text: str) -> bool:
    return all(letter == "\n" or letter.isprintable() for letter in text)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    return f"py:{tmp_path / 'models.py'}"


def test_a_columns_name_is_shown_with_its_escapes(brim: Brim, models: str) -> None:
    Path("rows.csv").write_text(f'question,"{HOSTILE}"\na,A\n', encoding="utf-8")
    result = brim("eval", f"{models}:shout", "-d", "rows.csv", "--map", "prompt=query", "--device", "cpu")
    assert result.code == 2
    assert SHOWN in result.err
    assert harmless(result.err)


def test_a_samples_error_is_shown_with_its_escapes(brim: Brim, models: str) -> None:
    Path("rows.csv").write_text(f"id,question,answer\n{HOSTILE},a,A\n", encoding="utf-8")
    arguments = ("eval", f"{models}:broken", "-d", "rows.csv", "--device", "cpu", "--no-cache")
    result = brim(*arguments, "-o", "run")
    assert result.code == 1
    assert f"failed: {SHOWN}: ValueError: {SHOWN}" in result.out
    assert harmless(result.out + result.err)
    document = brim(*arguments, "-o", HOSTILE.replace("/", "|"), "--json")
    assert harmless(document.out + document.err)
    assert HOSTILE.replace("/", "|") in json.loads(document.out)["request"]["argv"]


@pytest.mark.parametrize("colour", [False, True])
def test_a_failed_experiment_is_shown_with_its_escapes(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    launcher = FakeLauncher(lambda job: failed(job, error=f"ValueError: {HOSTILE}"))
    monkeypatch.setattr("brim.sweeps.prepare.choose_launcher", lambda *arguments: launcher)
    monkeypatch.setenv("COLUMNS", "300")
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    grid = tmp_path / "grid.yaml"
    grid.write_text("training: {device: cpu}\ngrid_search: {grid: {model.type: [mlp]}}\n", encoding="utf-8")
    result = brim("sweep", str(grid), "--no-forecast", "-o", str(tmp_path / "out"))
    assert result.code == 1, result.err
    colours = re.compile(r"\x1b\[[0-9;]*m")
    assert bool(colours.search(result.out)) is colour, "rich's own styles still work"
    if not colour:
        assert harmless(result.out + result.err)
        assert SHOWN in result.err
    assert SHOWN in colours.sub("", result.out)


@pytest.mark.parametrize(
    "arguments",
    [
        ("find", HOSTILE),
        ("eval", "MODEL", "-d", f"{HOSTILE}.csv"),
        ("eval", "MODEL", "-d", "undecodable\udc9b.csv"),
        ("report", HOSTILE),
        (HOSTILE,),
        ("find", f"--{HOSTILE}"),
    ],
)
def test_a_name_on_the_command_line_is_shown_with_its_escapes(
    brim: Brim, models: str, arguments: tuple[str, ...]
) -> None:
    result = brim(*(f"{models}:shout" if argument == "MODEL" else argument for argument in arguments))
    assert (result.code, result.out) == (2, "")
    assert result.err
    assert harmless(result.err)


def test_a_traceback_is_shown_with_its_escapes(
    models: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # what the command sets is put back
    with pytest.raises(RequestError) as caught:
        run(["eval", f"{models}:shout", "-d", HOSTILE.replace("/", ""), "--debug"])
    sys.excepthook(caught.type, caught.value, caught.tb)  # as Python does with what leaves the program
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert SHOWN.replace("/", "") in shown
    assert harmless(shown)


def test_a_reader_that_has_gone_does_not_change_how_a_command_ends() -> None:
    """As with `| head`: rich would end the process with 1, which is what a failed check ends with."""
    code = (
        "import os, sys\n"
        "from brim.cli.console import output_console\n"
        "read, write = os.pipe()\n"
        "os.close(read)\n"
        "os.dup2(write, 1)\n"
        "console = output_console()\n"
        "console.print('nobody reads this')\n"
        "console.print('nor this')\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_full_disk_behind_standard_output_is_an_error_of_a_line(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("brim.cli.forecast.print_gpus", full)
    result = brim("forecast", "--gpus")
    assert (result.code, result.err) == (2, "brim: cannot write: No space left on device\n")
