"""`brim.ood` and `brim.encode`: the settings of the commands as typed parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

import brim
from tests.molecules.molecule_files import ALKANES, RINGS, csv_of, features_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_ood_takes_the_settings_of_the_command(tmp_path: Path) -> None:
    inner, outer = csv_of(tmp_path / "in.csv", ALKANES), csv_of(tmp_path / "out.csv", RINGS)
    result = brim.ood(
        id=inner, ood=outer, knob={"bits": 64}, seeds=[3, 5], lr=1e-2, epochs=2, hidden=[8], baselines=["knn"],
        loss=["energy", "bce"], device="cpu", output=tmp_path / "run",
    )  # fmt: skip
    assert result.folder == tmp_path / "run"
    assert [(cell.method, cell.seed) for cell in result.cells] == [
        ("dpo", 3), ("dpo", 5), ("dpo-bce", 3), ("dpo-bce", 5), ("knn", None),
    ]  # fmt: skip
    assert result.summary["trainings"][0]["width"] == 64


def test_defaults_are_those_of_the_command_line(tmp_path: Path) -> None:
    inner = features_of(tmp_path / "in.safetensors", 40, shift=0.0)
    outer = features_of(tmp_path / "out.safetensors", 40, shift=1.5, seed=1)
    result = brim.ood(id=inner, ood=outer, epochs=1, device="cpu", output=tmp_path / "run")
    assert [(cell.seed, cell.lr) for cell in result.cells] == [(seed, 1e-3) for seed in range(10)]


def test_encode_writes_a_file_of_features(tmp_path: Path) -> None:
    source = csv_of(tmp_path / "in.csv", ["CCO", "bad!", "CC"])
    result = brim.encode(source, tmp_path / "f.safetensors", knob={"bits": 32}, device="cpu")
    assert (result.path, result.width) == (tmp_path / "f.safetensors", 32)
    assert list(result.failures) == ["in.csv line 3"]
    with pytest.raises(brim.RequestError, match="resume="):
        brim.encode(source, tmp_path / "g.safetensors", resume=True)


def test_errors_name_parameters(tmp_path: Path) -> None:
    with pytest.raises(brim.RequestError, match="id= and ood= go together"):
        brim.ood(id=tmp_path / "in.csv")
    with pytest.raises(brim.RequestError, match=r"baselines='knm'.*did you mean knn"):
        brim.ood(id="a", ood="b", baselines="knm")
