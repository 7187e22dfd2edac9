"""A device that is full when a model is loaded: every command ends with three and says how much is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests import saved_models

Brim = Callable[..., Any]

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A language model, questions for it, a factory, and the file of a training run."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "what is 1 plus 1 ?", "answer": "2"}) + "\n")
    factory = tmp_path / "nets.py"
    factory.write_text(
        "import torch\ndef net(device):\n    return torch.nn.Linear(8, 8).to(device), lambda n: torch.ones(n, 8)\n"
    )
    numpy.savez(tmp_path / "rows.npz", features=numpy.ones((40, 4), "float32"), labels=numpy.arange(40) % 2)
    training = tmp_path / "training.yaml"
    training.write_text(
        f"model: {{type: mlp, params: {{hidden: [8]}}}}\ndata: {{root: {tmp_path / 'rows.npz'}}}\n"
        "hp: {epochs: 1, effective_batch: 8}\ntraining: {device: cpu}\n"
    )
    model = saved_models.save_language_model(tmp_path / "lm")
    return {"LM": str(model), "DATA": str(questions), "FACTORY": f"py:{factory}:net", "TRAINING": str(training)}


COMMANDS = {
    "eval": ("eval", "-m", "LM", "-d", "DATA", "--device", "cpu", "-o", "OUT"),
    "profile": ("profile", "-m", "LM", "-d", "DATA", "--knob", "max_new_tokens=1,2", "--device", "cpu", "-o", "OUT"),
    "find": ("find", "LM", "--device", "cpu"),
    "find on data": ("find", "LM", "-d", "DATA", "--device", "cpu"),
    "train": ("train", "TRAINING", "-o", "OUT"),
}


@pytest.mark.parametrize("error", FULL, ids=["OutOfMemoryError", "CUDA error"])
@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_do_not_fit_end_with_three_and_the_bytes(
    brim: Brim, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, error: Exception
) -> None:
    def full(self: torch.nn.Module, *arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "to", full)
    result = brim(*({**files, "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[command]))
    message = " ".join(result.err.split())
    assert result.code == 3, message
    assert re.search(r"weights do not fit: .* on cpu: [\d.]+ \w+ needed, [\d.]+ [TGMK]iB free", message)
    assert "Traceback" not in message


def test_a_factory_that_fills_the_device_ends_with_three(
    brim: Brim, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: torch.nn.Module, *arguments: Any, **more: Any) -> None:
        raise FULL[0]

    monkeypatch.setattr(torch.nn.Module, "to", full)
    result = brim("find", files["FACTORY"], "--device", "cpu")
    message = " ".join(result.err.split())
    assert result.code == 3
    assert "20.0 MiB more needed" in message


def test_a_device_too_full_for_its_context_ends_with_three_in_any_command(
    brim: Brim, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise FULL[1]

    monkeypatch.setattr("brim.memory.devices.CpuMemory.total_bytes", full)
    for command in ("eval", "find", "train"):
        result = brim(*({**files, "OUT": str(tmp_path / command)}.get(word, word) for word in COMMANDS[command]))
        assert result.code == 3, command
        assert "not enough memory on cpu" in " ".join(result.err.split())
        assert "Traceback" not in result.err
