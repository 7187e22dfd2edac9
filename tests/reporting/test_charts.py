"""Charts as data: what is drawn of rows, where an axis ends, and how long a caption is."""

from __future__ import annotations

import dataclasses
from typing import Any

from brim.reporting.charts import Axis, Chart, Row, category_chart, crosses, limit_line, line_chart
from brim.reporting.drawing import draw
from brim.reporting.theme import Series, series_for


def rows_of(lines: str, figures: tuple[float, ...] = (0.0, 0.4, 1.0)) -> list[Row]:
    return [
        {"x": float(x), "y": y, "line": line, "label": f"epoch {x}", "shown": f"{y:.2f}"}
        for line in lines
        for x, y in enumerate(figures)
    ]


def lines_chart(lines: str, **options: Any) -> Chart:
    axes = {"x": Axis("epoch", "whole"), "y": Axis("score", "score")}
    chart = line_chart("Score", rows_of(lines), **{**axes, "series": series_for(list(lines)), **options})
    assert chart is not None
    return chart


def domain_of(chart: Chart) -> list[float]:
    layers = draw(chart)["layer"]
    found: list[float] = layers[0]["encoding"]["y"]["scale"]["domain"]
    return found


def test_only_an_axis_of_scores_is_fixed_to_zero_and_one() -> None:
    assert domain_of(lines_chart("a")) == [0.0, 1.0]
    low, high = domain_of(lines_chart("a", y=Axis("loss", "near")))
    assert low < 0 < 1 < high


def test_one_line_of_many_can_be_joined_and_the_others_stay_points() -> None:
    series = [dataclasses.replace(one, joined=one.label == "c") for one in series_for(list("abcdef"))]
    chart = lines_chart("abcdef", series=series)
    drawn = {marks.mark: {row["line"] for row in marks.rows} for marks in chart.marks}
    assert drawn == {"line": {"c"}, "point": set("abcdef")}


def test_points_that_no_line_joins_stay_points_however_many_they_are() -> None:
    rows = [{"x": float(n), "y": n % 7, "line": "a", "label": str(n), "shown": str(n)} for n in range(200)]
    for joined, expected in ((True, {"line", "hover"}), (False, {"point"})):
        series = [Series(label="a", colour="red", joined=joined)]
        chart = line_chart("Sizes", rows, x=Axis("value"), y=Axis("size"), series=series)
        assert chart is not None
        assert {marks.mark for marks in chart.marks} == expected


def test_a_legend_names_a_lone_series_beside_a_limit_and_of_very_many_the_first_and_the_last() -> None:
    assert lines_chart("a").keys == []
    assert [key.label for key in lines_chart("a", marked=[limit_line(0.5)]).keys] == ["a", "memory limit"]
    assert [key.label for key in lines_chart("abcdefghijklmnopq").keys] == ["a", "to", "q"]


def test_a_caption_names_few_lines_and_of_many_the_highest_and_the_lowest() -> None:
    assert lines_chart("a").caption == "Score: from 0.00 at epoch 0 to 1.00 at epoch 2."
    assert "b from 0.00" in lines_chart("ab").caption
    assert lines_chart("abcdefgh").caption == "Score: highest 1.00 (a, epoch 2), lowest 0.00 (a, epoch 0)."
    many = [{"name": f"m{n}", "line": "run", "x": n / 27, "shown": f"{n / 27:.2f}"} for n in range(27)]
    chart = category_chart("Metrics", many, x=Axis("score"), what="metric")
    assert chart is not None
    assert chart.caption == "Score by metric: highest 0.96 (m26), lowest 0.00 (m0)."


def test_a_chart_of_which_nothing_is_known_is_none() -> None:
    unknown = [{**row, "y": None} for row in rows_of("a")]
    assert line_chart("Score", unknown, x=Axis(), y=Axis()) is None
    assert category_chart("Score", [], x=Axis(), what="metric") is None


def test_failures_without_a_figure_are_drawn_at_the_bottom() -> None:
    failed: list[Row] = [
        {"x": 1.0, "label": "1", "reason": "no sample fits"},
        {"x": 2.0, "y": 0.5, "label": "2", "reason": "out of memory"},
    ]
    chart = lines_chart("a", marked=crosses(failed))
    drawn = {marks.mark: len(marks.rows) for marks in chart.marks if "cross" in marks.mark}
    assert drawn == {"cross": 1, "cross at the bottom": 1}
    assert [key.label for key in chart.keys] == ["failed"]
