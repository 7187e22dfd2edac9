"""Plans on disk: when one is used, when it is checked, when it is searched anew, and what can never break a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.records import Plan
from brim.searching import probe as probe_module
from brim.sizing.plans import PlanCache

KIB = 1024


def rows(size: int) -> torch.Tensor:
    return torch.ones(size, 256)  # 1 KiB a row


class Steps:
    """A step that counts how often a probe made a batch for it."""

    def __init__(self, fails_from: int = 10**9) -> None:
        self.sizes: list[int] = []
        self.fails_from = fails_from

    def make_batch(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return rows(size)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) >= self.fails_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return batch * 2

    def find(self, **settings: Any) -> Plan:
        self.sizes.clear()
        asked = {"key": "steps", "device": "cpu", "memory_limit": 64 * KIB, "max_batch_size": 64, **settings}
        return brim.find_batch_size(self.step, self.make_batch, objective=asked.pop("objective", "largest"), **asked)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def plans(own_cache_folder: Path) -> Path:
    return own_cache_folder / "brim" / "plans"


@pytest.fixture
def other_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def change() -> None:
        monkeypatch.setattr(probe_module, "environment_facts", lambda device: {"torch": "another"})

    return change


def test_a_closure_is_not_cached_without_a_key(steps: Steps, plans: Path) -> None:
    plan = steps.find(key=None)
    assert plan.fingerprint is None
    assert not plans.exists()
    assert not steps.find(key=None).cached


def test_under_a_key_the_second_search_makes_no_probe(steps: Steps, plans: Path) -> None:
    first = steps.find()
    assert (first.cached, first.batch_size) == (False, 32)
    assert len(list(plans.glob("*.json"))) == 1
    second = steps.find()
    assert second.cached
    assert second.batch_size == second.batch_size_max == 32
    assert steps.sizes == []
    assert second.probes == ()
    assert second.reason.startswith("cached")
    assert second.memory == first.memory
    assert second.fingerprint == first.fingerprint


def test_another_key_is_another_entry(steps: Steps, plans: Path) -> None:
    steps.find()
    assert not steps.find(key="others").cached
    assert len(list(plans.glob("*.json"))) == 2


@pytest.mark.parametrize(
    "change", [{"memory_limit": 32 * KIB}, {"objective": "fastest"}, {"multiple_of": 8}, {"batch_size": 8}]
)
def test_another_request_is_another_entry(steps: Steps, change: dict[str, Any]) -> None:
    steps.find()
    assert not steps.find(**change).cached
    assert steps.sizes


def test_how_long_one_may_search_does_not_change_the_entry(steps: Steps) -> None:
    steps.find()
    assert steps.find(max_probes=20, probe_timeout_seconds=60.0).cached


def test_no_cache_neither_reads_nor_writes(steps: Steps, plans: Path) -> None:
    steps.find(use_cache=False)
    assert not list(plans.glob("*.json"))
    steps.find()
    assert not steps.find(use_cache=False).cached


def test_a_search_cut_short_is_not_kept(steps: Steps, plans: Path) -> None:
    assert steps.find(max_probes=2).batch_size < 32
    assert not list(plans.glob("*.json"))


def test_a_plan_made_on_a_crowded_device_is_not_used_on_an_empty_one(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.memory.devices.CpuMemory.available_bytes", lambda self: 20 * KIB)
    crowded = steps.find(memory_limit=None)
    monkeypatch.setattr("brim.memory.devices.CpuMemory.available_bytes", lambda self: 60 * KIB)
    emptied = steps.find(memory_limit=None)
    assert not emptied.cached
    assert emptied.batch_size > crowded.batch_size
    assert steps.find(memory_limit=None).cached


def test_a_plan_is_used_only_if_enough_memory_is_free_now(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.find()
    monkeypatch.setattr("brim.memory.devices.CpuMemory.available_bytes", lambda self: 20 * KIB)
    plan = steps.find()
    assert not plan.cached
    assert plan.batch_size == 10
    assert plan.memory.limit_bytes == 20 * KIB


def test_a_stale_plan_is_verified_with_exactly_one_probe(
    steps: Steps, other_environment: Callable[[], None], plans: Path
) -> None:
    steps.find()
    other_environment()
    plan = steps.find()
    assert steps.sizes == [32]
    assert plan.cached
    assert (plan.batch_size, [probe.batch_size for probe in plan.probes]) == (32, [32])
    assert "one probe" in plan.reason
    again = steps.find()
    assert steps.sizes == []
    assert again.cached
    assert len(list(plans.glob("*.json"))) == 1


def test_the_reason_of_a_reused_stale_plan_does_not_grow(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.find()
    for version in range(4):
        monkeypatch.setattr(probe_module, "environment_facts", lambda device, v=version: {"torch": v})
        plan = steps.find()
        assert plan.cached
        assert steps.find().cached
    assert plan.reason.count("cached") == 1


def test_a_stale_plan_that_fails_is_searched_again(steps: Steps, other_environment: Callable[[], None]) -> None:
    steps.find()
    other_environment()
    steps.fails_from = 20
    plan = steps.find()
    assert steps.sizes[0] == 32
    assert len(steps.sizes) > 2
    assert not plan.cached
    assert plan.batch_size == 19
    steps.fails_from = 10**9
    assert steps.find().batch_size == 19


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"plan": {}}', '{"plan": {"schema": "brim.plan/9"}}', "\x00\x01"]
)
def test_a_corrupt_file_is_no_entry(steps: Steps, plans: Path, content: str) -> None:
    steps.find()
    (file,) = plans.glob("*.json")
    file.write_text(content, encoding="utf-8")
    plan = steps.find()
    assert not plan.cached
    assert plan.batch_size == 32
    assert any("ignored" in note for note in plan.notes)
    assert steps.find().cached


@pytest.mark.parametrize("damage", [{"plan": 3}, {"saved_at": "yesterday"}, {"environment": None}])
def test_an_entry_with_a_damaged_field_breaks_nothing(steps: Steps, plans: Path, damage: dict[str, Any]) -> None:
    steps.find()
    (file,) = plans.glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}), encoding="utf-8")
    assert steps.find().batch_size == 32
    list(PlanCache().entries())


def edit(file: Path, *, probe: dict[str, Any] | None = None, **fields: Any) -> None:
    """Change fields of the one cached plan, and of its probe at the chosen size."""
    entry = json.loads(file.read_text(encoding="utf-8"))
    (chosen,) = (one for one in entry["plan"]["probes"] if one["batch_size"] == entry["plan"]["size"])
    chosen.update(probe or {})
    entry["plan"].update(fields)
    file.write_text(json.dumps(entry), encoding="utf-8")


@pytest.mark.parametrize(
    "size", [10**12, 65, 0, -5, 3.7, True, "32", None, 10**400, float("nan")], ids=lambda size: repr(size)[:16]
)
def test_an_edited_size_is_ignored_and_the_plan_notes_it(steps: Steps, plans: Path, size: Any) -> None:
    steps.find()
    (file,) = plans.glob("*.json")
    edit(file, probe={"batch_size": size}, size=size)
    plan = steps.find()
    assert (plan.cached, plan.batch_size) == (False, 32)
    assert any(str(file) in note and "ignored" in note for note in plan.notes)
    assert steps.find().cached


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size_max": "x"}, {"batch_size_max": 8}, {"batch_size_max": 10**9}, {"batch_size_max_estimate": "x"},
        {"unit": "tokens"}, {"unit": []}, {"objective": "fastest"}, {"reason": 3}, {"cached": "no"}, {"memory": "x"},
        {"memory": {"limit_bytes": "x", "headroom_bytes": 1}}, {"probes": []}, {"probes": "x"}, {"probes": [3]},
        {"probe": {"peak_reserved_bytes": None}}, {"probe": {"peak_reserved_bytes": -1}}, {"notes": 5},
        {"probe": {"samples_per_second": "x"}}, {"probe": {"verdict": "oom"}}, {"device": None},
    ],
    ids=str,
)  # fmt: skip
def test_any_wrong_field_is_ignored_and_the_plan_notes_it(steps: Steps, plans: Path, fields: dict[str, Any]) -> None:
    steps.find()
    (file,) = plans.glob("*.json")
    edit(file, **fields)
    plan = steps.find()
    assert (plan.cached, plan.batch_size) == (False, 32)
    assert any(str(file) in note for note in plan.notes)


@pytest.mark.parametrize("asked", [{"multiple_of": 8}, {"power_of_two": True}])
def test_a_cached_size_that_the_request_does_not_allow_is_ignored(
    steps: Steps, plans: Path, asked: dict[str, Any]
) -> None:
    steps.find(**asked)
    (file,) = plans.glob("*.json")
    edit(file, probe={"batch_size": 31}, size=31)
    assert steps.find(**asked).batch_size == 32


def test_a_plan_filed_under_the_name_of_another_is_ignored(steps: Steps, plans: Path) -> None:
    steps.find(objective="fastest")
    (other,) = plans.glob("*.json")
    content = other.read_text(encoding="utf-8")
    other.unlink()
    steps.find()
    (file,) = plans.glob("*.json")
    file.write_text(content, encoding="utf-8")
    assert not steps.find().cached


def test_a_plan_whose_probe_has_an_unknown_verdict_is_no_entry(steps: Steps, plans: Path) -> None:
    steps.find()
    (file,) = plans.glob("*.json")
    file.write_text(file.read_text().replace('"verdict": "oom"', '"verdict": "molten"'), encoding="utf-8")
    assert steps.find().batch_size == 32


def test_an_unwritable_folder_loses_the_entry_and_not_the_run(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert steps.find().batch_size == 32
    assert not steps.find().cached


def test_entries_are_listed_newest_first_and_cleared(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate(("old", "new")):
        monkeypatch.setattr("brim.sizing.plans.time.time", lambda number=number: 1_000.0 + number)
        steps.find(key=key)
    cache = PlanCache()
    assert [entry.identity["workload"]["key"] for entry in cache.entries()] == ["new", "old"]
    assert [entry.plan.batch_size for entry in cache.entries()] == [32, 32]
    assert cache.clear() == 2
    assert list(cache.entries()) == []
    assert cache.clear() == 0


def test_a_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "nowhere")
    assert list(cache.entries()) == []
    assert cache.load({"workload": {"key": "x"}}, lambda plan: None) == (None, ())
    assert cache.clear() == 0
