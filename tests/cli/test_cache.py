"""`brim cache list|clear`: what is kept, and an empty shelf."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.records import MemoryFigures, Plan
from brim.sizing.plans import PlanCache

Brim = Callable[..., Any]


def find(brim: Brim, factories: str, limit: str) -> None:
    arguments = ("--memory-limit", limit, "--max-batch-size", "64", "--device", "cpu", "--objective", "largest")
    assert brim("find", f"py:{factories}:rows", *arguments).code == 0


def test_an_empty_cache_names_its_folder(brim: Brim, own_cache_folder: Path) -> None:
    result = brim("cache", "list")
    assert result.code == 0
    assert str(own_cache_folder) in result.out.replace("\n", "")
    assert json.loads(brim("cache", "list", "--json").out)["plans"] == []


def test_plans_are_listed_and_cleared(brim: Brim, factories: str, own_cache_folder: Path) -> None:
    find(brim, factories, "64KiB")
    find(brim, factories, "32KiB")
    listed = json.loads(brim("cache", "list", "--json").out)
    assert listed["schema"] == "brim.cache/1"
    assert listed["folder"] == str(own_cache_folder / "brim" / "plans")
    assert [entry["plan"]["size"] for entry in listed["plans"]] == [16, 32]
    assert all(entry["identity"]["workload"]["model"].endswith("nets.py:rows") for entry in listed["plans"])
    assert {(entry["command"], entry["work"]) for entry in listed["plans"]} == {("find", "forward")}
    assert brim("cache", "list").out.count("cpu") == 2
    assert "removed 2 plans" in brim("cache", "clear").out
    assert json.loads(brim("cache", "list", "--json").out)["plans"] == []
    assert "removed 0 plans" in brim("cache", "clear").out


def test_a_damaged_file_is_neither_listed_nor_in_the_way(brim: Brim, factories: str, own_cache_folder: Path) -> None:
    find(brim, factories, "64KiB")
    (own_cache_folder / "brim" / "plans" / "damaged.json").write_text("{")
    assert len(json.loads(brim("cache", "list", "--json").out)["plans"]) == 1
    assert "1 damaged" in brim("cache", "list").out
    assert "removed 2 plans" in brim("cache", "clear").out


def test_every_row_names_its_model_its_command_and_its_unit(brim: Brim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan = Plan(
        unit="tokens", size=4096, batch_size_max=4000, batch_size_max_estimate=None, objective="fastest", reason="r",
        cached=False, device="cpu", memory=MemoryFigures(limit_bytes=10, headroom_bytes=2), probes=(),
    )  # fmt: skip
    samples = dataclasses.replace(plan, unit="samples", size=48)
    filed: list[tuple[Plan, dict[str, Any]]] = [
        (plan, {"kind": "eval", "model": "hf:small", "task": {"task": "generate"}, "device": "cpu"}),
        (samples, {"kind": "train", "workload": {"model": "resnet18"}, "mode": "train", "device": "cpu"}),
        (samples, {"workload": {"key": "my step"}, "mode": "forward", "device": "cpu"}),
        (samples, {"workload": {"net": "own", "width": 8}, "mode": "forward", "device": "cpu"}),
    ]
    for one, identity in filed:
        PlanCache().save(one, identity, {})
    listed = json.loads(brim("cache", "list", "--json").out)["plans"]
    assert {(entry["model"], entry["command"], entry["work"]) for entry in listed} == {
        ("hf:small", "eval", "generate"),
        ("resnet18", "train", "train"),
        ("my step", "find", "forward"),
        ("net=own, width=8", "find", "forward"),
    }
    shown = [" ".join(line.split()) for line in brim("cache", "list").out.splitlines()]
    assert "?" not in " ".join(shown)
    assert any(line.startswith("hf:small eval generate cpu 4096 tokens") for line in shown)
    assert any(line.startswith("resnet18 train train cpu 48 samples") for line in shown)
