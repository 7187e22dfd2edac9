"""The front door: exit codes, interrupts, tracebacks on request, and old spellings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from brim import __version__
from brim.cli.main import run
from brim.cli.pasted import dashed
from brim.errors import DoesNotFitError, LostError, RankError, RequestError
from brim.settings.commands import COMMANDS
from tests import saved_models
from tests.monitor.fake_nvml import FakeNvml

Brim = Callable[..., Any]


def test_the_version_is_printed_with_torch_cuda_and_device(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    code, out, err = brim("--version")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    assert (code, err) == (0, "")
    assert out == f"brim {__version__}, torch {torch.__version__}, {built}, NVIDIA H200\n"


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("find", "--help"), ("cache", "-h")])
def test_help_ends_with_zero(brim: Brim, arguments: tuple[str, ...]) -> None:
    result = brim(*arguments)
    assert result.code == 0
    assert "Usage" in result.out


@pytest.mark.parametrize("command", ["", "cache", *COMMANDS])
def test_help_ends_with_an_example_of_the_command(brim: Brim, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    last = brim(*command.split(), "--help").out.rstrip().splitlines()[-1]
    assert f"{last.strip()} ".startswith(f"Example: brim {command} ".replace("  ", " ")), last


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_is_cut_on_a_terminal_of_80_columns(brim: Brim, command: str) -> None:
    shown = brim(*command.split(), "--help").out
    assert re.findall(r" -{1,2}[a-z][a-z-]*…", shown) == []


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

    monkeypatch.setattr("brim.cli.find.search", fail)
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

    monkeypatch.setattr("brim.cli.find.search", fail)
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


# ------------------------------------------------------------------------------------------------- --json

LOUD = """
import ctypes
import os
import torch

print("loud: import")

def say(where):
    print(f"loud: {where}")
    os.system("echo loud: child process")
    ctypes.CDLL(None).printf(b"loud: C\\n")

def answers():
    def answer(samples):
        say("function")
        return [sample.prompt for sample in samples]
    return answer

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(4, num_classes)

    def forward(self, rows):
        say("forward")
        return self.layer(rows)

def net(num_classes: int = 2):
    return Net(num_classes)

def rows():
    def step(batch):
        say("step")
        return batch * 2
    return step, lambda n: torch.ones(n, 256)
"""


@pytest.mark.parametrize("command", ["eval", "profile", "find", "knobs", "train"])
def test_what_user_code_prints_goes_to_standard_error_with_json(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """By Python, by a child process, by C code: the document is alone on standard output."""
    (tmp_path / "loud.py").write_text(LOUD)
    questions = [{"question": f"q{number}", "answer": "a"} for number in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    rows = numpy.random.default_rng(0).standard_normal((16, 4)).astype("float32")
    numpy.savez(tmp_path / "rows.npz", features=rows, labels=numpy.arange(16) % 2)
    loud, run_folder = f"py:{tmp_path / 'loud.py'}", str(tmp_path / "run")
    small = ("--device", "cpu", "--no-cache")
    data = ("-d", str(tmp_path / "data.jsonl"), "-o", run_folder, *small)
    (tmp_path / "train.yaml").write_text(
        f"model: {{type: '{loud}:net'}}\ndata: {{root: {tmp_path / 'rows.npz'}}}\n"
        "hp: {epochs: 1, effective_batch: 8, batch_size: 8}\n"
    )
    arguments = {
        "eval": (f"{loud}:answers", *data),
        "profile": (f"{loud}:answers", "--knob", "dtype=float32", *data),
        "find": (f"{loud}:rows", "--memory-limit", "64KiB", *small),
        "knobs": (f"{loud}:net",),
        "train": (str(tmp_path / "train.yaml"), "-o", run_folder, *small),
    }[command]
    before = sys.stdout
    with pytest.raises(SystemExit) as stop:
        run([command, *arguments, "--json"])
    captured = capfd.readouterr()
    assert stop.value.code in (0, None), captured.err
    assert "schema" in json.loads(captured.out)
    assert "loud: import" in captured.err
    if command != "knobs":  # which builds nothing
        assert {"loud: C", "loud: child process"} <= set(captured.err.splitlines())
    assert sys.stdout is before
    print("as before")
    assert capfd.readouterr().out == "as before\n"


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("knobs", "MODEL"),
    ("find", "MODEL", "--device", "cpu"),
    ("forecast", "MODEL", "-b", "2"),
    ("eval", "MODEL", "-d", "DATA", "--device", "cpu"),
    ("profile", "MODEL", "-d", "DATA", "--knob", "max_new_tokens=2", "--device", "cpu"),
)


def refused_everywhere(brim: Brim, model: Path, words: str) -> None:
    """Every command that loads a model ends with 2 and one line that names the model."""
    data = model.parent / "data.jsonl"
    data.write_text('{"question": "w1", "answer": "w2"}\n')
    for command in COMMANDS:
        result = brim(*({"MODEL": str(model), "DATA": str(data)}.get(part, part) for part in command))
        line = " ".join(result.err.split())
        assert result.code == 2, (command, result)
        assert f"MODEL hf:{model}" in line, command
        assert words in line, command


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", -5, "config.json"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("hidden_size", "wide", "Field 'hidden_size' expected int, got str"),
        ("num_attention_heads", 0, "config.json"),
        ("vocab_size", None, "Field 'vocab_size' expected int"),
        ("dtype", "float99", "float99"),
        ("architectures", 7, "architectures is 7"),
        ("hidden_act", "nonsense", "nonsense"),
    ],
)
def test_nonsense_in_config_json_is_refused_by_every_command(
    brim: Brim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where a profile whose points all fail leaves its record
    model = saved_models.save_language_model(tmp_path / "lm")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, field: value}))
    if field == "hidden_act":  # found only when the model itself is made
        monkeypatch.setattr(f"{__name__}.COMMANDS", COMMANDS[1:])
    refused_everywhere(brim, model, words)


@pytest.mark.parametrize("header", [b"", b"GGUF", b"not a header" * 9, b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 90])
def test_a_gguf_file_with_a_broken_header_is_refused_by_every_command(
    brim: Brim, tmp_path: Path, header: bytes
) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(header)
    refused_everywhere(brim, model, "broken.gguf")
