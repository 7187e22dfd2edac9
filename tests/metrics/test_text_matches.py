from __future__ import annotations

import pytest

from brim.metrics.contains import Contains
from brim.metrics.exact_match import ExactMatch
from brim.metrics.normalised_match import NormalisedMatch, normalise_answer
from brim.metrics.token_f1 import TokenF1


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
