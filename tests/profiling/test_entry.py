"""Where a knob no longer changes what the model sees."""

from __future__ import annotations

from typing import Any

import pytest

from brim.evaluation.timing import StageTimes
from brim.profiling.entry import latency_figures, mark_saturation, percentile


def entry(crops: int, used: float, **more: Any) -> dict[str, Any]:
    return {"max_crops": crops, "crops_used_mean": used, "vision_tokens_mean": 12 * used, "saturated": False, **more}


def test_values_beyond_what_the_pictures_have_are_marked_and_noted() -> None:
    entries = [entry(4, 4.0), entry(6, 5.5), entry(9, 5.5), entry(12, 5.5)]
    (line,) = mark_saturation(entries, ["max_crops"])
    assert [one["saturated"] for one in entries] == [False, False, True, True]
    assert "from 9 on" in line
    assert mark_saturation([entry(4, 4.0), entry(6, 5.5)], ["max_crops"]) == []


def test_only_points_that_differ_in_this_knob_alone_are_compared() -> None:
    entries = [entry(4, 4.0, max_new_tokens=8), entry(9, 4.0, max_new_tokens=16)]
    assert mark_saturation(entries, ["max_crops", "max_new_tokens"]) == []


def test_models_without_pictures_never_saturate() -> None:
    entries = [{"reach": 2, "saturated": False}, {"reach": 4, "saturated": False}]
    assert mark_saturation(entries, ["reach"]) == []


def test_knobs_that_change_no_picture_never_saturate() -> None:
    entries = [entry(4, 4.0, max_new_tokens=1), entry(4, 4.0, max_new_tokens=2)]
    assert mark_saturation(entries, ["max_new_tokens"]) == []
    assert not any(one["saturated"] for one in entries)


def batch(size: int, total: float, *, settled: bool = True, **stages: float) -> StageTimes:
    return StageTimes(batch_size=size, settled=settled, total_ms=total, **stages)


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(1, 50, None), (2, 50, 1), (19, 95, None), (20, 95, 19), (99, 99, None), (100, 99, 99), (1000, 99, 990)],
)
def test_a_percentile_with_too_few_values_is_none(count: int, percent: int, expected: int | None) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert percentile(values, percent) == expected


def test_a_batchs_time_is_undivided_and_stages_that_are_not_there_are_none() -> None:
    figures = latency_figures([batch(32, 100.0, decode_ms=60.0), batch(32, 120.0, decode_ms=70.0)], batch_size=32)
    assert figures is not None
    assert figures["total"]["p50"] == 100.0
    assert figures["decode"]["p50"] == 60.0
    assert figures["vision"] is None
    assert (figures["batch_size"], figures["num_batches"]) == (32, 2)


def test_small_and_early_batches_do_not_stand_for_the_size_used() -> None:
    times = [batch(2, 5.0), batch(32, 500.0, settled=False), batch(32, 100.0), batch(30, 90.0), batch(1, 1.0)]
    figures = latency_figures(times, batch_size=32)
    assert figures is not None
    assert figures["num_batches"] == 2
    assert figures["total"]["p50"] == 90.0
    assert latency_figures([], batch_size=32) is None
    assert latency_figures(times, batch_size=None) is None
