"""The preview of a sweep as text."""

from __future__ import annotations

from pathlib import Path

from brim.settings.config_files import expand_grid
from brim.sweeps.preview import render_preview, varied_keys
from tests.settings.sweep_problems import FILES

SEED = FILES / "seed.yaml"


def test_the_preview_says_what_is_paired_and_why() -> None:
    text = render_preview(expand_grid(SEED, max_experiments=3))
    assert text.splitlines() == [
        "the first 3 of 9 experiments (81 with every list crossed)",
        "pairing: zip. 9 models and 9 batch sizes: each model gets the batch size at its",
        "  place in the list, because the counts are equal (pairing: auto).",
        "",
        "#  model.type   hp.batch_size  id",
        "1  r3d_18       128            r3d_18-b128-lr0.001-f3327cdffd5b",
        "2  mc3_18       64             mc3_18-b64-lr0.001-ffc75c2752f6",
        "3  r2plus1d_18  128            r2plus1d_18-b128-lr0.001-3ef902fc1d4d",
        "",
        "in all: hp.learning_rate 0.001 · optimizer.name adam",
    ]


def test_a_preview_fits_the_terminal_and_shows_warnings() -> None:
    grid = {
        "model.type": [f"timm:{'long' * 20}", "b"],
        "hp.batch_size": [1, 2, 3],
        "optimizer.params.weight_decay": [0, 0.1],
        "data.root": ["x" * 60, "y"],
    }
    text = render_preview(expand_grid(grid), width=80)
    table, _, warnings = text.rpartition("\n\n")
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "…" in table
    assert warnings.startswith("warning: hp.batch_size: 2 models and 3 batch sizes")


def test_a_long_table_is_cut_and_says_by_how_much() -> None:
    expansion = expand_grid({"model.type": ["m"], "hp.seed": list(range(100))})
    lines = render_preview(expansion, most_rows=10).splitlines()
    rows = [line for line in lines if line[:1].isdigit() and "m-" in line]
    assert len(rows) == 10
    assert rows[-1].startswith("100")
    assert "… 90 more …" in lines


def test_columns_are_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "task: {tag: regression}\nmodel: {type: m}\n"
        "grid_search:\n  groups:\n    one: {hp.epochs: [1]}\n    two: {hp.frames: [2], hp.epochs: 1}\n"
    )
    expansion = expand_grid(path)
    assert varied_keys(expansion.experiments) == ["hp.frames"]
    text = render_preview(expansion)
    assert "pairing of one: product." in text
    assert "1  —          m-" in text
    assert text.endswith("1 note on the file")


def test_groups_without_an_experiment_are_named() -> None:
    whole = {
        "models_to_train": ["a"],
        "grid_search": {"groups": {"x": {"model.type": ["a"]}, "y": {"model.type": ["b"]}}},
    }
    text = render_preview(expand_grid(whole))
    assert "no experiment here of y" in text
    assert "pairing of y" not in text
