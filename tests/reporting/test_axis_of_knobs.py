"""Where the points of a profile lie, for one knob, several, or knobs that are no numbers."""

from __future__ import annotations

from brim.reporting.kinds.profile_view import make_points


def test_one_numeric_knob_is_the_axis() -> None:
    axis, points = make_points(["max_crops"], [{"max_crops": 4}, {"max_crops": 2}])
    assert (axis.title, axis.scale, axis.values) == ("max_crops", "knob", (2.0, 4.0))
    assert [(point.label, point.short, point.x, point.line) for point in points] == [
        ("max_crops=4", "4", 4, ""),
        ("max_crops=2", "2", 2, ""),
    ]


def test_numbers_that_were_written_as_text_are_numbers() -> None:
    axis, points = make_points(["size"], [{"size": "64"}, {"size": "2048"}])
    assert (axis.scale, axis.values) == ("log knob", (64.0, 2048.0))  # 32 times as much: steps are multiples
    assert [point.short for point in points] == ["64", "2048"]


def test_long_numbers_are_written_with_their_thousands_apart_but_named_as_they_are() -> None:
    _, points = make_points(["max_pixels"], [{"max_pixels": 1_572_864}])
    assert (points[0].label, points[0].short) == ("max_pixels=1572864", "1,572,864")


def test_of_several_knobs_the_one_with_most_values_is_the_axis() -> None:
    entries = [{"tokens": tokens, "crops": crops} for tokens in (8, 16) for crops in (2, 3, 4)]
    axis, points = make_points(["tokens", "crops"], entries)
    assert axis.title == "crops"
    assert points[4].label == "tokens=16, crops=3"
    assert points[4].short == "16\u00a0·\u00a03"
    assert (points[4].x, points[4].line) == (3, "tokens=16")


def test_knobs_without_numbers_make_an_axis_of_words() -> None:
    axis, points = make_points(["dtype"], [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": True}])
    assert (axis.scale, axis.values) == ("words", ("float32", "bfloat16", "yes"))
    assert points[1].x == "bfloat16"


def test_a_value_that_is_missing_is_a_dash_not_a_crash() -> None:
    axis, points = make_points(["size"], [{"size": 64}, {}])
    assert axis.scale == "words"
    assert points[1].label == "size=—"
