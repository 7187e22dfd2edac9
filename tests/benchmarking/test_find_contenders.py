"""The decorators as contenders: the same step under the same limit, on a CPU as on a card."""

from __future__ import annotations

import argparse
import importlib.util
import types
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.find import _jobs
from benchmarks.find_contenders import kind_of, with_accelerate, with_decorator, with_lightning
from brim.memory.devices import CpuMemory

LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def quick_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for cycles takes a fifth of a second each time, and nothing here depends on it."""
    monkeypatch.setattr(CpuMemory, "release", lambda self, thorough=True: None)


def workload() -> Any:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        model.zero_grad()

    return types.SimpleNamespace(
        device=torch.device("cpu"), step=step, make_batch=lambda count: torch.ones(count, 64)
    )  # fmt: skip


def test_both_decorators_meet_the_limit_and_brims_in_fewer_tries() -> None:
    ours = with_decorator(workload(), LIMIT, "brim-decorator-1024")
    theirs = with_accelerate(workload(), LIMIT, "accelerate-1024")
    assert 1 < ours["tries"] < theirs["tries"]
    assert ours["ooms"] == ours["tries"] - 1
    assert 0.5 * theirs["size"] <= ours["size"] < 1024
    assert ours["probes"][-1]["peak_allocated_bytes"] <= LIMIT


def test_a_trial_of_lightnings_finder_is_a_few_steps() -> None:
    """It counts optimizer steps: without any, each trial was an epoch, and the finder never ended."""
    measured, steps = workload(), []

    def counted(batch: torch.Tensor, step: Any = measured.step) -> None:
        steps.append(len(batch))
        step(batch)

    measured.step = counted
    found = with_lightning(measured, LIMIT, "lightning-power")
    assert found["size"] == max(size for size in steps if steps.count(size) == 3)
    assert found["ooms"] == 1
    assert len(steps) <= 3 * found["tries"]


def test_a_peer_that_is_not_installed_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else there(name))
    arguments = argparse.Namespace(
        workloads="lstm", contenders="brim,accelerate-64", before=None, limit="1GiB", tiny=True, further_steps=1,
        curves=False,
    )  # fmt: skip
    assert [job["contender"] for job in _jobs(arguments)] == ["brim"]
    assert capsys.readouterr().err == "accelerate-64 is left out: accelerate is not installed\n"


def test_a_contender_is_known_by_its_name() -> None:
    names = ("brim", "brim-before", "brim-decorator-1024", "accelerate-128", "lightning-power")
    assert [kind_of(name) for name in names] == ["brim", "brim", "brim-decorator", "accelerate", "lightning"]
