"""Points and rows of a profile: their axis, the front, the recommendation, latencies, probes."""

from __future__ import annotations

from typing import Any

import pytest

from brim.reporting.kinds.profile import latency_rows
from brim.reporting.kinds.profile_view import ProfileView, cost_of, make_points, recommended
from brim.reporting.search import probe_rows
from tests.reported_runs import GIB, profile_document, profile_entry


def points_of(document: dict[str, Any]) -> Any:
    return make_points(document["knobs"], document["summary"])[1]


def view_of(document: dict[str, Any]) -> ProfileView:
    axis, points = make_points(document["knobs"], document["summary"])
    return ProfileView(knobs=document["knobs"], metric="vqa", axis=axis, points=points)


def test_the_recommended_point_is_the_cheapest_within_else_the_best() -> None:
    document = profile_document()
    assert recommended(document).chosen == document["recommendation"]["cheapest_within"] == 9
    document["recommendation"]["cheapest_within"] = None
    assert recommended(document).chosen == document["recommendation"]["best"]
    document["recommendation"]["cheapest_meeting_latency"] = 0
    assert recommended(document).roles[0] == ("meets the latency",)


@pytest.mark.parametrize("given", [None, {}, {"best": 99, "front": [99, -1]}, {"best": "x", "front": 3, "text": 1}])
def test_a_recommendation_that_points_nowhere_is_none(given: Any) -> None:
    choice = recommended(profile_document(recommendation=given))
    assert (choice.chosen, choice.front, choice.sentences) == (None, (), ())


def test_the_front_has_every_point_with_accuracy_and_cost_and_its_roles() -> None:
    document = profile_document([profile_entry(2), {**profile_entry(3), "accuracy": None}, profile_entry(4)])
    choice = recommended(document)
    rows = view_of(document).front_rows(choice.cost, [choice.front], choice)
    assert [row["short"] for row in rows] == ["2", "4"]
    assert [row["front"] for row in rows] == [True, True]
    assert rows[1]["roles"] == "recommended, most accurate"
    assert rows[0]["x"] == pytest.approx(1000 / profile_entry(2)["samples_per_second"])


def test_costs_are_in_the_unit_they_are_named_with() -> None:
    point = profile_entry(2)
    assert cost_of(point, "latency_ms") == profile_entry(2)["latency_ms"]["batch_1"]["total"]["p50"]
    assert cost_of(point, "peak_reserved_bytes") == profile_entry(2)["peak_reserved_bytes"] / GIB
    assert cost_of(point, "num_samples") == 2000
    assert cost_of(point, "no such figure") is None


def test_an_interval_needs_both_its_figures_and_ends_where_scores_do() -> None:
    entries = [{**profile_entry(2), "accuracy": 0.5, "accuracy_ci95": half} for half in (None, 0.25, 0.75)]
    view = view_of(profile_document(entries))
    rows = view.rows(view.accuracy)
    assert [(row.get("low"), row.get("high")) for row in rows] == [(None, None), (0.25, 0.75), (0.0, 1.0)]
    assert rows[0]["shown"] == "0.500"


def test_a_latency_without_parts_is_shown_as_a_total() -> None:
    whole = {
        **profile_entry(2),
        "latency_ms": {"batch_1": {"batch_size": 1, "total": {"p50": 9.0}}, "batch_used": None},
    }
    points = points_of(profile_document([whole, {**profile_entry(3), "latency_ms": None}]))
    rows = latency_rows(points, "batch_1")
    assert [(row["short"], row["p50"], row["p95"], row["vision"]) for row in rows] == [("2", 9.0, None, None)]
    assert latency_rows(points, "batch_used") == []


def test_a_probe_that_did_not_fit_is_drawn_at_its_need_or_the_limit() -> None:
    probes = [
        {"batch_size": 8, "verdict": "fits", "peak_reserved_bytes": 5, "samples_per_second": 2.0},
        {"batch_size": 16, "verdict": "oom", "needed_bytes": 12},
        {"batch_size": 32, "verdict": "size_limit"},
        {"verdict": "oom"},
    ]
    rows = probe_rows(probes, limit_bytes=10)
    assert [(row["step"], row["fits"], row["verdict"], row["drawn_bytes"]) for row in rows] == [
        (1, True, "fits", 5),
        (2, False, "out of memory", 12),
        (3, False, "size limit of a kernel", 10),
    ]


# --- where the points lie, for one knob, several, or knobs that are no numbers


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


def test_long_numbers_get_thousands_separators_but_names_do_not() -> None:
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
