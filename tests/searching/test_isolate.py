"""Probing in a child process: a kill, a crash, a hang or an error is a verdict or a message, and the search goes on.

Starting a child costs seconds, so each test does with one or two.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.errors import RequestError
from brim.searching.find import find_with
from brim.searching.isolate import IsolatedProber
from brim.searching.probe import ProbeSettings, WorkloadError
from brim.settings.find_settings import SearchSettings
from tests.searching.isolated_factories import UNMADE

KIB = 1024


@pytest.fixture(autouse=True)
def importable_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here if not inherited else f"{here}{os.pathsep}{inherited}")


def isolated(kind: str, *, size: int = 10**9, timeout: float | None = None) -> IsolatedProber:
    settings = ProbeSettings(memory_limit_bytes=64 * KIB, timeout_seconds=timeout, steady_seconds=0.001, max_steps=3)
    return IsolatedProber("isolated_factories:build", {"kind": kind, "size": size}, settings)


@contextlib.contextmanager
def no_child_left(prober: IsolatedProber) -> Iterator[IsolatedProber]:
    with prober:
        child = prober._child
        yield prober
    assert child is not None
    assert not child.running


def test_a_child_that_is_killed_is_out_of_memory_and_the_search_continues() -> None:
    prober = isolated("killed", size=20)
    plan = find_with(prober, SearchSettings(objective="largest", batch_size=21, max_size=21))
    assert plan.probes[0].verdict == "oom"
    assert "killed by signal 9" in plan.probes[0].detail
    assert plan.batch_size == 20
    assert plan.oom_events == 1
    assert prober._child is None


def test_a_child_probes_like_this_process_and_an_abort_is_fatal() -> None:
    with no_child_left(isolated("aborts", size=32)) as prober:
        assert (prober.context.device, prober.context.limit_bytes, prober.context.exact) == ("cpu", 64 * KIB, True)
        fits = prober.probe(32)
        assert (fits.verdict, fits.peak_allocated_bytes) == ("fits", 64 * KIB)
        assert fits.samples_per_second is not None
        crash = prober.probe(33)
    assert (crash.verdict, crash.fits) == ("fatal", False)
    assert "aborted" in crash.detail


def test_a_child_that_hangs_is_ended_and_counts_as_a_timeout() -> None:
    with no_child_left(isolated("hangs", size=4, timeout=10.0)) as prober:
        assert prober.probe(4).verdict == "fits"
        hung = prober.probe(5)
        assert (hung.verdict, hung.fits) == ("timeout", False)
        assert "10 s" in hung.detail


def test_a_workload_error_is_a_wrong_request_and_keeps_the_child() -> None:
    with no_child_left(isolated("raises", size=3)) as prober:
        with pytest.raises(WorkloadError, match=r"the step raised IndexError[^$]*by the step at batch size"):
            prober.probe(4)
        with pytest.raises(WorkloadError, match="make_batch raised KeyError"):
            prober.probe(UNMADE)
        assert prober.probe(3).verdict == "fits"
    assert prober._child is None


def test_a_factory_that_raises_is_a_wrong_request_and_leaves_no_child() -> None:
    prober = isolated("unbuildable")
    with pytest.raises(RequestError, match="ValueError: no such width: 7"), prober:
        pass
    assert prober._child is None


def test_a_device_that_breaks_is_fatal_with_its_own_message() -> None:
    with isolated("fatal", size=2) as prober:
        broken = prober.probe(3)
    assert broken.verdict == "fatal"
    assert "illegal memory access" in broken.detail
