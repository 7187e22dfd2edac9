from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Brim = Callable[..., Any]


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`--id` and `--ood` of two small files of features, and quick settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name, shift in (("in", 0.0), ("out", 2.0)):
        save_file({"features": (generator.normal(size=(60, 8)) + shift).astype(np.float32)}, f"{name}.safetensors")
    files = ["--id", "in.safetensors", "--ood", "out.safetensors"]
    return [*files, "--device", "cpu", "--hidden", "8", "--epochs", "3", "--seeds", "3"]


def test_the_table_fits_eighty_columns_and_names_the_folder(brim: Brim, sides: list[str]) -> None:
    result = brim("ood", *sides, "--baselines", "knn", "-o", "run")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["method", "data", "AUROC", "AUPR", "FPR95"]
    assert [line.split()[0] for line in lines[1:3]] == ["dpo", "knn"]
    assert max(len(line) for line in lines[:3]) <= 80
    assert "±" in lines[1]
    assert "in run" in lines
    assert result.err.splitlines() == [
        "in-vs-out · features: 8 features",
        "in + out: train 42 + 42, validation 6 + 6, test 12 + 12",
    ]
    assert Path("run/run.json").exists()


def test_json_is_the_record_and_nothing_else(brim: Brim, sides: list[str]) -> None:
    result = brim("train", "dpo", *sides, "--json", "-o", "run")  # the name of before
    assert result.code == 0
    assert json.loads(result.out)["summary"]["metrics"]["auroc"]["values"]
    assert result.err == ""


def test_values_by_commas_and_underscores_are_understood(brim: Brim, sides: list[str]) -> None:
    arguments = ["--loss", "energy,hinge", "--lr", "1e-2,1e-3", "--effective_batch", "16", "--fast_path", "stacked"]
    result = brim("ood", *sides[:-1], "3,5", *arguments, "--json", "-o", "run")
    run = json.loads(result.out)
    assert (run["request"]["seeds"], run["request"]["lrs"]) == ([3, 5], [0.01, 0.001])
    assert len(run["summary"]["table"]) == 4
    assert run["summary"]["effective_batch_size"] == 16
    assert run["summary"]["fast_path"] == "stacked"


def test_patience_is_a_number_of_validations_and_zero_is_never(brim: Brim, sides: list[str]) -> None:
    for patience, kept in (("2", 2), ("0", None)):
        run = json.loads(brim("ood", *sides, "--patience", patience, "--json", "-o", f"run-{patience}").out)
        assert run["request"]["patience"] == kept


def test_a_failed_seed_ends_with_exit_code_one_and_names_step_and_rows(brim: Brim, sides: list[str]) -> None:
    result = brim("ood", *sides, "--lr", "1e38", "-o", "run")
    assert result.code == 1
    assert "the loss became nan in epoch" in result.out
    assert "on rows in.safetensors row" in result.out
    assert "failed" in result.out.splitlines()[1]


def test_molecules_that_cannot_be_read_end_with_exit_code_one(brim: Brim, sides: list[str]) -> None:
    Path("in.csv").write_text("smiles\n" + "\n".join(["C" * n for n in range(1, 30)] + ["xx"]) + "\n", encoding="utf-8")
    Path("out.csv").write_text("smiles\n" + "\n".join(["N" + "C" * n for n in range(30)]) + "\n", encoding="utf-8")
    result = brim("ood", "--id", "in.csv", "--ood", "out.csv", *sides[4:], "-o", "run")
    assert result.code == 1
    assert "in.csv line 31: 'xx'" in result.err
    assert "1 molecules left out" in result.out


def test_resuming_needs_a_folder_and_counts_finished_cells(brim: Brim, sides: list[str]) -> None:
    assert "--resume: name the run with --output DIR" in brim("ood", *sides, "--resume").err
    brim("ood", *sides, "-o", "run")
    refused = brim("ood", *sides, "-o", "run")
    assert refused.code == 2
    assert "--resume" in refused.err
    resumed = brim("ood", *sides, "-o", "run", "--resume")
    assert resumed.code == 0
    assert "resumed: 3 of 3 cells were done already" in resumed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "none"], "--seeds none: write numbers"),
        (["--seeds", "0"], "--seeds 0: give how many, from 1"),
        (["--seeds", "1,1"], "--seeds 1,1: one is named twice"),
        (["--lr", "fast"], "--lr fast: write numbers"),
        (["--hidden", "8,x"], "--hidden 8,x: write numbers"),
        (["--hidden", "9" * 40], "a layer has from 1 to 2147483647 units"),
        (["--effective-batch", "many"], "--effective-batch many: it must be auto or a whole number"),
        (["--map", "id=x"], "--map id=x: there is no 'id' among smiles, label"),
        (["--baselines", "knm"], "did you mean knn"),
    ],
)
def test_wrong_values_are_refused_with_the_flag(
    brim: Brim, sides: list[str], arguments: list[str], message: str
) -> None:
    result = brim("ood", *sides, *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def test_ctrl_c_keeps_finished_cells(brim: Brim, sides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.molecules import cells

    real = cells.train_heads

    def stop_at_hinge(features: Any, loss: Any, *rest: Any, **more: Any) -> object:
        if loss.name == "hinge":
            raise KeyboardInterrupt
        return real(features, loss, *rest, **more)

    monkeypatch.setattr(cells, "train_heads", stop_at_hinge)
    result = brim("ood", *sides, "--loss", "energy,hinge", "-o", "run")
    assert result.code == 130
    assert "continue with --resume -o run" in result.err
    assert len(Path("run/cells.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_help_has_an_example(brim: Brim) -> None:
    result = brim("ood", "--help")
    assert result.code == 0
    assert "Example: brim ood" in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "--fast-path" in result.out
