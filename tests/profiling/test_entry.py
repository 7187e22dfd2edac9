"""Where a knob no longer changes what the model sees."""

from __future__ import annotations

from typing import Any

from brim.profiling.entry import mark_saturation


def entry(crops: int, used: float, **more: Any) -> dict[str, Any]:
    return {"max_crops": crops, "crops_used_mean": used, "vision_tokens_mean": 12 * used, "saturated": False, **more}


def test_values_beyond_what_the_pictures_have_are_marked_and_told() -> None:
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
