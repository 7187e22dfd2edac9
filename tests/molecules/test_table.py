from __future__ import annotations

import csv
import io

import pytest

from brim.molecules.table import ResultCell, cells_csv, metrics_by_seed, table_csv, table_rows


def cell(method: str, seed: int | None, auroc: float | None, data: str = "a") -> ResultCell:
    metrics = None if auroc is None else {"auroc": auroc, "aupr": auroc / 2, "fpr95": 1 - auroc}
    error = "the loss became nan" if auroc is None else None
    return ResultCell(data=data, encoder="morgan", method=method, seed=seed, metrics=metrics, error=error)


CELLS = [
    cell("dpo", 0, 0.8), cell("dpo", 1, 0.9), cell("dpo", 2, None), cell("knn", None, 0.6),
    cell("dpo", 0, 0.6, "b"), cell("dpo", 1, 0.7, "b"), cell("dpo", 2, 0.5, "b"),
]  # fmt: skip


def test_rows_are_method_by_data_set_with_mean_deviation_and_values() -> None:
    rows = table_rows(CELLS)
    assert [(row["method"], row["data"], row["seeds"], row["failed"]) for row in rows] == [
        ("dpo", "a", [0, 1], 1), ("knn", "a", [], 0), ("dpo", "b", [0, 1, 2], 0),
    ]  # fmt: skip
    assert rows[0]["auroc"] == {
        "mean": pytest.approx(0.85), "deviation": pytest.approx(0.05 * 2**0.5), "values": [0.8, 0.9],
    }  # fmt: skip
    assert rows[1]["auroc"]["deviation"] is None


def test_a_seed_is_averaged_over_sets_and_failed_seeds_are_excluded() -> None:
    metrics, seeds = metrics_by_seed([one for one in CELLS if one.method == "dpo"])
    assert seeds == [0, 1]
    assert metrics["auroc"]["values"] == pytest.approx([0.7, 0.8])
    assert metrics_by_seed([]) == ({}, [])


def test_csv_has_a_line_for_every_row_and_cell() -> None:
    rows = list(csv.DictReader(io.StringIO(table_csv(table_rows(CELLS)))))
    assert rows[0]["auroc_mean"] == "0.8500000000000001" or float(rows[0]["auroc_mean"]) == pytest.approx(0.85)
    assert rows[1]["auroc_deviation"] == ""
    cells = list(csv.DictReader(io.StringIO(cells_csv(CELLS))))
    assert len(cells) == len(CELLS)
    assert cells[2]["error"] == "the loss became nan"
    assert cells[3]["seed"] == ""


def test_a_cell_survives_json() -> None:
    for one in CELLS:
        assert ResultCell.from_json(one.to_json()) == one
