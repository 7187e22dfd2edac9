"""Traces one after the other on one axis, thinned without losing a peak."""

from __future__ import annotations

from typing import Any

import pytest

from brim.reporting.machine import MOST_ROWS, join_traces


def rows(seconds: list[float], **figures: Any) -> list[dict[str, Any]]:
    return [{"time_seconds": at, "gpu_utilisation": None, "host_cpu": 0.5, **figures} for at in seconds]


def test_traces_follow_each_other_without_their_pauses() -> None:
    trace = join_traces([("2", rows([5.0, 6.0, 7.0])), ("none", []), ("3", rows([0.0, 4.0]))])
    assert trace.stretches == (("2", 0, 2), ("3", 2, 6))
    assert [row["seconds"] for row in trace.rows] == pytest.approx([0, 1, 2, 6])  # where both meet they share a row
    assert not trace.gpu
    assert trace.known("host_cpu") == [0.5] * 4


def test_a_card_anywhere_makes_it_the_card_s() -> None:
    trace = join_traces([("a", rows([0, 1])), ("b", rows([0, 1], gpu_utilisation=0.9, gpu_memory_used_bytes=7))])
    assert trace.gpu
    assert trace.known("gpu_utilisation") == [0.9, 0.9]
    assert "host_cpu" not in trace.rows[0]


def test_thinning_keeps_the_mean_of_use_and_the_peak_of_memory() -> None:
    many = rows([step / 100 for step in range(20_000)], gpu_utilisation=0.5, gpu_memory_used_bytes=1)
    many[12_345]["gpu_memory_used_bytes"] = 99
    trace = join_traces([("a", many)])
    assert len(trace.rows) == MOST_ROWS
    assert max(trace.known("gpu_memory_used_bytes")) == 99
    assert set(trace.known("gpu_utilisation")) == {0.5}


def test_no_trace_is_no_rows() -> None:
    assert join_traces([]).rows == join_traces([("a", [])]).rows == []
