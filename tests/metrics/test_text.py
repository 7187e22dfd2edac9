"""Metrics of short answers as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.metrics.text import Anls, Contains, ExactMatch, NormalisedMatch, TokenF1, edit_distance, normalise_answer


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("Paris", ["Paris"], 1),
        (" Paris\n", ["Paris"], 1),
        ("paris", ["Paris"], 0),
        ("Paris.", ["Paris"], 0),
        ("Paris", ["London", "Paris"], 1),
        ("the Paris", ["Paris"], 0),
    ],
)
def test_exact_match(prediction: str, references: list[str], score: float) -> None:
    assert ExactMatch().score(prediction, references) == score


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("don't", "dont"),
        ("A", ""),
        ("état", "état"),
        ("3.5%", "35"),
    ],
)
def test_squad_normalisation(text: str, plain: str) -> None:
    assert normalise_answer(text) == plain


def test_normalised_match_ignores_case_punctuation_and_articles() -> None:
    assert NormalisedMatch().score("The Paris.", ["paris"]) == 1
    assert NormalisedMatch().score("Paris, France", ["paris"]) == 0


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("I think it is Paris, in France.", "paris", 1),
        ("I know.", "no", 0),
        ("No, I know.", "no", 1),
        ("It is New  York", "the New York", 1),
        ("York is new", "New York", 0),
        ("anything", "the", 0),
    ],
)
def test_contains_whole_words_in_a_row(prediction: str, reference: str, score: float) -> None:
    assert Contains().score(prediction, [reference]) == score


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("black cat", ["cat"], 2 / 3),  # precision 1/2, recall 1
        ("cat cat cat", ["cat"], 1 / 2),  # one of three counts
        ("dog", ["cat"], 0),
        ("big red dog", ["red dog house party"], 4 / 7),
        ("dog", ["cat", "the dog"], 1),
        ("the", ["a"], 1),
        ("the", ["cat"], 0),
    ],
)
def test_token_f1(prediction: str, references: list[str], score: float) -> None:
    assert TokenF1().score(prediction, references) == pytest.approx(score)


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
