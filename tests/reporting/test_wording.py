"""Sentences that say what a chart shows."""

from __future__ import annotations

from brim.errors import plural
from brim.reporting.units import score_text
from brim.reporting.wording import listed, trend_words


def test_a_trend_names_its_ends_and_what_lies_beyond_them() -> None:
    figures = [("2", 0.5), ("3", 0.9), ("4", None), ("5", 0.7)]
    assert trend_words(figures, score_text) == "from 0.500 at 2 to 0.700 at 5; highest 0.900 at 3"
    assert trend_words([("2", 0.5), ("3", 0.1), ("4", 0.7)], score_text) == (
        "from 0.500 at 2 to 0.700 at 4; lowest 0.100 at 3"
    )


def test_a_trend_of_little_is_said_plainly() -> None:
    assert trend_words([("2", None)], score_text) == "not known"
    assert trend_words([("2", 0.5), ("3", None)], score_text) == "0.500 at 2"
    assert trend_words([("2", 0.50001), ("3", 0.5)], score_text) == "0.500 throughout"


def test_lists_end_with_and() -> None:
    assert [listed(list("abcdefgh"[:count])) for count in (0, 1, 2, 3)] == ["", "a", "a and b", "a, b and c"]
    assert listed(list("abcdefgh"), most=4) == "a, b, c and 5 more"
    assert [plural(1, "probe"), plural(2000, "probe"), plural(2, "datum", "data")] == [
        "1 probe",
        "2,000 probes",
        "2 data",
    ]
