from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.metrics.anls import Anls, edit_distance

short = st.text("abc ", max_size=8)


@pytest.mark.parametrize(
    ("first", "second", "edits"),
    [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_edit_distance(first: str, second: str, edits: int) -> None:
    assert edit_distance(first, second) == edits


@given(short, short, short)
def test_edit_distance_is_a_distance(first: str, second: str, third: str) -> None:
    assert edit_distance(first, second) == edit_distance(second, first)
    assert (edit_distance(first, second) == 0) == (first == second)
    assert edit_distance(first, third) <= edit_distance(first, second) + edit_distance(second, third)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("ITC Limited", ["itc limited"], 1),
        ("itc  limited ", ["itc limited"], 1),
        ("TVLKINGHEVDS", ["talkingheads", "talking heads"], 10 / 12),
        ("kitten", ["sitting"], 4 / 7),
        ("abcd", ["abxy"], 0.5),  # exactly at the threshold counts
        ("abcde", ["abxyz"], 0),  # 0.4 is below it
        ("it is written at the very top of the page: 12", ["12"], 0),
    ],
)
def test_anls(prediction: str, references: list[str], score: float) -> None:
    assert Anls().score(prediction, references) == pytest.approx(score)


def test_the_threshold_can_be_set() -> None:
    assert Anls(threshold=0.3).score("abcde", ["abxyz"]) == pytest.approx(0.4)


@given(short, short)
def test_the_short_cut_by_length_changes_nothing(first: str, second: str) -> None:
    given_text, wanted = " ".join(first.split()), " ".join(second.split())
    longer = max(len(given_text), len(wanted))
    alike = 1 - edit_distance(given_text, wanted) / longer if longer else 1.0
    assert Anls().similarity(first, second) == (alike if alike >= 0.5 else 0.0)
