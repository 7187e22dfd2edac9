"""`brim cache list|clear`: what is kept, and an empty shelf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Brim = Callable[..., Any]


def find(brim: Brim, factories: str, limit: str) -> None:
    arguments = ("--memory-limit", limit, "--max-batch-size", "64", "--device", "cpu", "--objective", "largest")
    assert brim("find", f"py:{factories}:rows", *arguments).code == 0


def test_an_empty_cache_says_where_it_looked(brim: Brim, own_cache_folder: Path) -> None:
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
    assert brim("cache", "list").out.count("cpu") == 2
    assert "removed 2 plans" in brim("cache", "clear").out
    assert json.loads(brim("cache", "list", "--json").out)["plans"] == []
    assert "removed 0 plans" in brim("cache", "clear").out


def test_a_damaged_file_is_neither_listed_nor_in_the_way(brim: Brim, factories: str, own_cache_folder: Path) -> None:
    find(brim, factories, "64KiB")
    (own_cache_folder / "brim" / "plans" / "damaged.json").write_text("{")
    assert len(json.loads(brim("cache", "list", "--json").out)["plans"]) == 1
    assert "removed 2 plans" in brim("cache", "clear").out
