"""The forecast against peaks that were measured on real cards, whichever are stored in benchmarks/data."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks" / "data").glob("peaks-*.json"))
MOST_SIZES = 5  # of one case


def stored_cases() -> list[tuple[Path, int, str]]:
    """Every case of every stored measurement."""
    found = []
    for file in FILES:
        for place, measurement in enumerate(json.loads(file.read_text())["measurements"]):
            found += [(file, place, name) for name in dict.fromkeys(case["case"] for case in measurement["cases"])]
    return found


_rows: dict[tuple[Path, int, str], list[dict[str, Any]]] = {}


def compared(file: Path, place: int, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of benchmarks/forecast.py for one case, at a few of its sizes."""
    if (file, place, name) not in _rows:
        monkeypatch.syspath_prepend(str(ROOT))
        from benchmarks.forecast import _compared_measurement

        stored = json.loads(file.read_text())
        measurement = stored["measurements"][place]
        peaks = [case for case in measurement["cases"] if case["case"] == name]
        step = max(len(peaks) // MOST_SIZES, 1)
        _rows[file, place, name] = _compared_measurement(stored["gpu"], {**measurement, "cases": peaks[::step]}, name)
    return _rows[file, place, name]


def error(row: dict[str, Any], kind: str) -> float:
    return row[f"forecast_{kind}_bytes"] / row[f"peak_{kind}_bytes"] - 1


def test_there_are_stored_peaks_with_the_versions_they_were_made_with() -> None:
    assert FILES
    for file in FILES:
        stored = json.loads(file.read_text())
        assert stored["schema"] == "brim.peaks/1"
        for measurement in stored["measurements"]:
            assert measurement["method"]
            assert {"gpu", "cuda", "packages"} <= set(measurement["environment"])
            assert "torch" in measurement["environment"]["packages"]


@pytest.mark.parametrize(
    ("file", "place", "name"), stored_cases(), ids=lambda value: getattr(value, "stem", str(value))
)
def test_a_measured_peak_is_met(file: Path, place: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compared(file, place, name, monkeypatch)
    assert rows
    for row in rows:
        assert row["approximate"] is None
        assert abs(error(row, "allocated")) < 0.03, (row["batch_size"], error(row, "allocated"))
        assert -0.09 < error(row, "reserved") < 0.12, (row["batch_size"], error(row, "reserved"))


def test_all_of_them_together_are_met_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for case in stored_cases() for row in compared(*case, monkeypatch)]
    allocated = sorted(abs(error(row, "allocated")) for row in rows)
    reserved = sorted(abs(error(row, "reserved")) for row in rows)
    assert statistics.median(allocated) < 0.01
    assert allocated[int(0.95 * len(allocated))] < 0.03
    assert statistics.median(reserved) < 0.03
    assert reserved[int(0.95 * len(reserved))] < 0.10
    assert sys.modules["benchmarks.forecast"].summary(rows)
