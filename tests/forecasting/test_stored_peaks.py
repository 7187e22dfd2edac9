"""The forecast against peaks that were measured on real cards, whichever are stored in benchmarks/data."""

from __future__ import annotations

import functools
import importlib.metadata
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
# One case for each family of models and kind of step; the slow test takes all.
DAILY = (
    "resnet50 train bfloat16 adamw checkpointed", "mobilenet_v3_large train float32 adamw", "swin_t train bfloat16 sgd",
    "r3d_18 train bfloat16 adamw", "mvit_v1_b forward float32", "convnext_tiny forward float32",
    "qwen2 train bfloat16 512", "qwen2 generate bfloat16 128+32", "bert forward float32 256",
    "t5 generate float32 256+32", "llava forward bfloat16", "pairwise head train float32 2048",
)  # fmt: skip


@functools.cache
def stored_in(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def stored_cases() -> list[tuple[Path, int, str]]:
    """Every case of every stored measurement."""
    found = []
    for file in FILES:
        for place, measurement in enumerate(stored_in(file)["measurements"]):
            found += [(file, place, name) for name in dict.fromkeys(case["case"] for case in measurement["cases"])]
    return found


def is_fresh(file: Path, place: int) -> bool:
    """Whether each case had a process of its own, as a forecast assumes it."""
    return stored_in(file)["measurements"][place].get("after") is None


def is_of_this_code(file: Path, place: int, name: str) -> bool:
    """Whether the model's code is as it was measured: transformers' models change with its major versions."""
    packages = stored_in(file)["measurements"][place]["environment"]["packages"]
    measured, here = packages["transformers"], importlib.metadata.version("transformers")
    of_transformers = name.split()[0] in ("qwen2", "llama", "gpt2", "bert", "roberta", "t5", "llava")
    return not of_transformers or measured.split(".")[0] == here.split(".")[0]


def compared(file: Path, place: int, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of benchmarks/forecast.py for one case, at a few of its sizes."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.forecast import _compared_measurement

    stored = stored_in(file)
    measurement = stored["measurements"][place]
    peaks = [case for case in measurement["cases"] if case["case"] == name]
    step = max(len(peaks) // MOST_SIZES, 1)
    return _compared_measurement(stored["gpu"], {**measurement, "cases": peaks[::step]}, name)


def error(row: dict[str, Any], kind: str) -> float:
    return row[f"forecast_{kind}_bytes"] / row[f"peak_{kind}_bytes"] - 1


def test_there_are_stored_peaks_with_the_versions_they_were_made_with() -> None:
    assert FILES
    for file in FILES:
        stored = stored_in(file)
        assert stored["schema"] == "brim.peaks/1"
        for measurement in stored["measurements"]:
            assert measurement["method"]
            assert {"gpu", "cuda", "packages"} <= set(measurement["environment"])
            assert "torch" in measurement["environment"]["packages"]


@pytest.mark.parametrize(
    ("file", "place", "name"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[2].startswith("mvit") else ())  # as the smaller swin3d
        for case in stored_cases()
        if not is_fresh(*case[:2])
    ],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_a_peak_of_a_process_that_ran_other_sizes_is_met(
    file: Path, place: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compared(file, place, name, monkeypatch)
    assert rows
    for row in rows:
        assert row["approximate"] is None
        assert abs(error(row, "allocated")) < 0.03, row
        assert -0.10 < error(row, "reserved") < 0.12, row


@pytest.mark.parametrize("which", [pytest.param("all", marks=pytest.mark.slow), "daily"])
def test_the_targets_hold_for_fresh_processes(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in stored_cases() if is_fresh(*case[:2]) and is_of_this_code(*case)]
    rows = [row for case in cases if which == "all" or case[2] in DAILY for row in compared(*case, monkeypatch)]
    assert len(rows) >= (30 if which == "all" else 7)  # seven of the daily ones need no version of transformers
    assert not [row for row in rows if row["approximate"] is not None]
    assert not [row for row in rows if abs(error(row, "allocated")) > 0.01]
    assert not [row for row in rows if not -0.02 <= error(row, "reserved") < 0.12]
    allocated = sorted(abs(error(row, "allocated")) for row in rows)
    reserved = sorted(abs(error(row, "reserved")) for row in rows)
    assert statistics.median(allocated) <= 0.01
    assert statistics.median(reserved) <= 0.03
    if which == "all":  # percentiles of a part of the cases say little
        assert allocated[int(0.95 * len(allocated))] <= 0.03
        assert reserved[int(0.95 * len(reserved))] <= 0.08
    assert sys.modules["benchmarks.forecast"].summary(rows)
