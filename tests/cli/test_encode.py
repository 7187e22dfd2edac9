from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from brim.molecules.encoders import MorganEncoder

Brim = Callable[..., Any]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("smiles\n" + "\n".join("C" * n for n in range(1, 40)) + "\n", encoding="utf-8")
    Path("bad.csv").write_text("smiles\nCCO\nnot\nC1CC\nCC\n", encoding="utf-8")


def test_a_file_of_molecules_becomes_a_file_of_features(brim: Brim) -> None:
    result = brim("encode", "-m", "morgan", "-d", "good.csv", "-o", "f.safetensors", "--knob", "bits=128")
    assert result.code == 0
    assert load_file("f.safetensors")["features"].shape == (39, 128)
    assert result.out.splitlines()[0].startswith("39 molecules × 128 features")
    assert result.out.splitlines()[-1] == "in f.safetensors"
    again = brim("encode", "-d", "good.csv", "-o", "g.safetensors", "--knob", "bits=128")
    assert "from the cache" in again.out


def test_lines_that_cannot_be_read_are_named_and_end_with_exit_code_one(brim: Brim) -> None:
    result = brim("encode", "-d", "bad.csv", "-o", "f.safetensors")
    assert result.code == 1
    assert "bad.csv line 3: 'not'" in result.out
    assert load_file("f.safetensors")["features"].shape == (2, 2048)
    document = json.loads(brim("encode", "-d", "bad.csv", "-o", "f.safetensors", "--json").out)
    assert list(document["failures"]) == ["bad.csv line 3", "bad.csv line 4"]
    assert document["schema"] == "brim.encode/1"
    assert (document["molecules"], document["failed"], document["width"]) == (4, 2, 2048)


def test_ctrl_c_keeps_encoded_molecules_and_resume_continues(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = MorganEncoder.encode, []

    def stopping(self: MorganEncoder, smiles: Sequence[str]) -> Any:
        seen.extend(smiles)
        if len(seen) > 12:
            raise KeyboardInterrupt
        return real(self, smiles)

    with monkeypatch.context() as patch:
        patch.setattr(MorganEncoder, "encode", stopping)
        result = brim("encode", "-d", "good.csv", "-o", "f.safetensors")
    assert result.code == 130
    assert "continue with --resume" in result.err
    assert not Path("f.safetensors").exists()
    assert "holds" in brim("encode", "-d", "good.csv", "-o", "f.safetensors").err
    done = json.loads(brim("encode", "-d", "good.csv", "-o", "f.safetensors", "--resume", "--json").out)
    assert 0 < done["resumed"] < 39
    assert load_file("f.safetensors")["features"].shape == (39, 2048)
    assert not Path("f.safetensors.partial.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-d", "good.csv", "-o", "f.npz"], "features are written as FILE.safetensors"),
        (["-d", "absent.csv", "-o", "f.safetensors"], "cannot read absent.csv"),
        (["-d", "good.csv", "-o", "f.safetensors", "-m", "morgn"], "did you mean morgan"),
        (["-d", "good.csv", "-o", "f.safetensors", "--map", "smiles=x"], "has the columns smiles"),
        (["-d", "good.csv", "-o", "f.safetensors", "--map", "x"], "write it as smiles=COLUMN"),
        (["-d", "good.csv", "-o", "f.safetensors", "--resume"], "nothing to resume"),
        (["-d", "good.csv", "-o", "f.safetensors", "-b", "0"], "--batch-size 0"),
        (["-d", "good.csv", "-o", "cache.safetensors/"], "cache.safetensors"),
    ],
)
def test_wrong_requests_are_refused(brim: Brim, arguments: list[str], message: str) -> None:
    Path("cache.safetensors").mkdir()
    result = brim("encode", *arguments)
    assert result.code == 2
    assert message in result.err


def test_help_has_an_example(brim: Brim) -> None:
    result = brim("encode", "--help")
    assert result.code == 0
    assert "Example: brim encode -m morgan -d smiles.csv" in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 80
