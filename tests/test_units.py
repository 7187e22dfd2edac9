"""One way to write each quantity; an unknown figure is a dash, never a zero."""

from __future__ import annotations

import math

import pytest

from brim import units


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (1234.5, "1,234"), (43.14, "43.1"), (4.314, "4.31"), (0.04314, "0.0431"), (-43.14, "-43.1"),
        (999.9, "1,000"), (1e12, "1.00e+12"), (2e-6, "2.00e-06"),
    ],
)  # fmt: skip
def test_three_digits_count(value: float, written: str) -> None:
    assert units.significant(value) == written


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, "x", True, [1]])
def test_what_is_no_number_is_a_dash(unknown: object) -> None:
    shows = (
        units.significant, units.count_text, units.score_text, units.fraction_text, units.ratio_text, units.bytes_text,
        units.duration_text, units.signed_text,
    )  # fmt: skip
    assert {show(unknown) for show in shows} == {"—"}
    assert units.interval_text(unknown, 0.1) == "—"
    assert units.interval_text(0.5, unknown) == "0.500"


def test_scores_come_with_their_interval_and_differences_with_their_sign() -> None:
    assert units.interval_text(0.7406, 0.0121) == "0.741 ± 0.012"
    assert units.signed_text(0.0142, 0.006) == "+0.014 ± 0.006"
    assert units.signed_text(-0.0142) == "−0.014"


def test_bytes_of_a_chart_have_one_unit() -> None:
    assert units.byte_unit([None, 3 * 2**30, 2**20]).name == "GiB"
    unit = units.byte_unit([2**20, None, "x"])
    assert (unit.name, unit.of(3 * 2**20), unit.of(None)) == ("MiB", 3.0, None)
    assert units.byte_unit([]).name == "MiB"


@pytest.mark.parametrize(
    ("seconds", "written"), [(0.42, "0.420 s"), (59.9, "59.9 s"), (245, "4 min 5 s"), (11520, "3 h 12 min")]
)
def test_durations(seconds: float, written: str) -> None:
    assert units.duration_text(seconds) == written


def test_times_are_shown_in_utc() -> None:
    assert units.date_text("2026-11-05T15:18:41.3+01:00") == "5 November 2026, 14:18 UTC"
    assert units.date_text("2026-11-05T15:18:41") == "5 November 2026, 15:18"
    assert units.date_text("yesterday") == "yesterday"
    assert units.date_text(None) == "—"


def places(*figures: float) -> list[tuple[str, float, str]]:
    return [(str(place), figure, units.score_text(figure)) for place, figure in enumerate(figures, 2)]


def test_a_course_names_its_ends_and_what_lies_beyond_them() -> None:
    assert units.course(places(0.5, 0.9, 0.7)) == "from 0.500 at 2 to 0.700 at 4; highest 0.900 at 3"
    assert units.course(places(0.5, 0.1, 0.7)) == "from 0.500 at 2 to 0.700 at 4; lowest 0.100 at 3"


def test_a_short_course_is_described_in_words() -> None:
    assert units.course([]) == "not known"
    assert units.course(places(0.5)) == "0.500 at 2"
    assert units.course(places(0.50001, 0.5)) == "0.500 throughout"


def test_lists_end_with_and() -> None:
    assert [units.listed(list("abcdefgh"[:count])) for count in (0, 1, 2, 3)] == ["", "a", "a and b", "a, b and c"]
    assert units.listed(list("abcdefgh"), most=4) == "a, b, c and 5 more"


def test_a_model_is_called_by_the_end_of_its_path() -> None:
    names = ("/data/models/molmo2-1b/", "py:/x/models.py:answers", "resnet50", None)
    assert [units.short_name(name) for name in names] == ["molmo2-1b", "answers", "resnet50", "—"]
