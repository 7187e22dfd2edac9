"""Cases worked out by hand from the official rules; the table is the promise that the numbers compare with others'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.metrics.vqa import (
    CONTRACTIONS,
    VqaAccuracy,
    VqaAccuracySimple,
    leave_one_out_accuracy,
    normalise_vqa_answer,
)


def answers(**counts: int) -> list[str]:
    """Ten human answers: `answers(yes=7, no=3)`."""
    return [text for text, count in counts.items() for _ in range(count)]


def split(text: str, matches: int = 9) -> list[str]:
    """`matches` people said this, the others something else: never unanimous, so punctuation goes from all."""
    return [text] * matches + ["zebra crossing"] * (10 - matches)


CASES: list[tuple[str, list[str], float]] = [
    # leave one out: m of ten agree
    ("yes", answers(no=10), 0.0),
    ("yes", answers(yes=1, no=9), 0.3),
    ("yes", answers(yes=2, no=8), 0.6),
    ("yes", answers(yes=3, no=7), 0.9),
    ("yes", answers(yes=4, no=6), 1.0),
    ("yes", answers(yes=5, no=5), 1.0),
    ("yes", answers(yes=9, no=1), 1.0),
    ("yes", answers(yes=10), 1.0),
    ("no", answers(yes=8, no=2), 0.6),
    ("red", ["red", "red", "blue", "green", "blue", "blue", "white", "black", "pink", "red"], 0.9),
    ("pink", ["red", "red", "blue", "green", "blue", "blue", "white", "black", "pink", "red"], 0.3),
    ("grey", ["red", "red", "blue", "green", "blue", "blue", "white", "black", "pink", "red"], 0.0),
    # unanimous: the prediction is normalised, the answers are taken as they are
    ("Yes", ["yes"] * 10, 1.0),
    ("yes.", ["yes"] * 10, 1.0),
    ("  yes\n", ["yes"] * 10, 1.0),
    ("yes", ["yes\t"] * 10, 1.0),
    ("two", ["2"] * 10, 1.0),
    ("2", ["two"] * 10, 0.0),
    ("two", ["two"] * 10, 0.0),  # the prediction has become 2
    ("the cat", ["cat"] * 10, 1.0),
    ("the cat", ["the cat"] * 10, 0.0),
    ("A", ["A"] * 10, 0.0),
    ("dont walk", ["don't walk"] * 10, 1.0),
    ("STOP", ["STOP"] * 10, 0.0),
    ("stop", ["STOP"] * 10, 0.0),
    ("1,000", ["1000"] * 10, 1.0),
    ("hot dog", ["hot\ndog"] * 10, 1.0),
    ("yes", ["yes"] * 9 + ["yes "], 1.0),  # white space alone does not make them disagree
    ("Yes", ["yes"] * 9 + ["Yes"], 1.0),  # case does, but the nine are enough
    ("yes", ["yes"] * 9 + ["yes."], 1.0),
    # case
    ("Yes", split("yes"), 1.0),
    ("FIRE HYDRANT", split("fire hydrant"), 1.0),
    ("stop", split("STOP"), 0.0),
    # number words
    ("none", split("0"), 1.0),
    ("zero", split("none"), 0.0),
    ("one", split("1"), 1.0),
    ("2", split("two"), 0.0),
    ("Three", split("3"), 1.0),
    ("ten", split("10"), 1.0),
    ("eleven", split("11"), 0.0),  # the list ends at ten
    ("two dogs", split("2 dogs"), 1.0),
    ("twofold", split("2fold"), 0.0),  # whole words only
    # articles
    ("a dog", split("dog"), 1.0),
    ("an apple", split("apple"), 1.0),
    ("the man on the left", split("man on left"), 1.0),
    ("dog", split("The dog"), 0.0),
    ("another", split("other"), 0.0),
    ("a", split("the"), 0.0),  # only the prediction becomes nothing
    # contractions
    ("dont know", split("don't know"), 1.0),
    ("its", split("it's"), 0.0),  # a word of its own
    ("oclock", split("o'clock"), 1.0),
    ("12 oclock", split("12 o'clock"), 1.0),
    ("couldnt've", split("couldn't've"), 1.0),
    ("couldn'tve", split("couldn't've"), 1.0),
    ("couldntve", split("couldn't've"), 0.0),  # one apostrophe is restored, not two
    ("yall", split("y'all"), 1.0),
    ("y'all'dve", split("y'all'd've"), 1.0),
    ("Im", split("I'm"), 0.0),  # the official entry has a capital, which lower-casing has removed by then
    ("twas", split("'twas"), 1.0),
    ("somebody'd", split("somebodyd"), 1.0),  # the official entry is the wrong way round
    ("lets go", split("let's go"), 0.0),
    # punctuation: touching a space it goes, otherwise it becomes a space
    ("yes, sir", split("yes sir"), 1.0),
    ("black-white", split("black white"), 1.0),
    ("black - white", split("black white"), 1.0),
    ("t-shirt", split("tshirt"), 0.0),
    ("t-shirt t -x", split("tshirt t x"), 1.0),  # one hyphen at a space takes all of them along
    ("red/blue", split("red blue"), 1.0),
    ("yes!", split("yes"), 1.0),
    ("(left)", split("left"), 1.0),
    ('"stop"', split("stop"), 1.0),
    ("what?", split("what"), 1.0),
    ("snow_board", split("snow board"), 1.0),
    ("a@b", split("b"), 1.0),  # the sign becomes a space, then the article goes
    ("50%", split("50"), 0.0),  # the per cent sign is no punctuation here
    ("5:30", split("5 30"), 0.0),  # nor is the colon
    ("$5", split("5"), 0.0),
    # digit, comma, digit: every mark in the text goes
    ("1,000", split("1000"), 1.0),
    ("10,000-20,000", split("1000020000"), 1.0),
    ("1, 2", split("1 2"), 1.0),
    ("a,b", split("b"), 1.0),
    # periods
    ("yes.", split("yes"), 1.0),
    ("1.5", split("1.5"), 1.0),
    ("1.5", split("15"), 0.0),
    (".5", split("5"), 0.0),
    ("3.", split("3"), 1.0),
    ("u.s.a.", split("usa"), 1.0),
    ("p.m", split("pm"), 1.0),
    # white space
    ("hot\ndog", split("hot dog"), 1.0),
    ("hot\tdog ", split("hot  dog"), 0.0),
    # answers count together once their punctuation is gone, and not for more
    ("2", ["two", "2", "2.", "a 2", "three", "3", "4", "5", "6", "7"], 0.6),
    ("2", ["two", "2.", "3", "3", "3", "4", "4", "5", "5", "6"], 0.3),
    ("Dont.", ["don't", "dont", "Don't!", "stop", "go", "go", "go", "go", "stop", "no"], 0.3),
]


@pytest.mark.parametrize(("prediction", "people", "accuracy"), CASES)
def test_accuracy_agrees_with_the_official_rules(prediction: str, people: list[str], accuracy: float) -> None:
    assert len(people) == 10
    assert VqaAccuracy().score(prediction, people, {}) == pytest.approx(accuracy, abs=1e-12)


def test_the_table_is_as_long_as_promised_and_repeats_nothing() -> None:
    assert len({(prediction, tuple(people)) for prediction, people, _ in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize(("matches", "accuracy"), [(0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0), (10, 1.0)])
def test_the_simple_variant_is_a_third_for_each_match(matches: int, accuracy: float) -> None:
    assert VqaAccuracySimple().score("red", split("red", matches), {}) == pytest.approx(accuracy)


def test_the_simple_variant_normalises_unanimous_answers_too() -> None:
    assert VqaAccuracySimple().score("Yes.", ["yes"] * 10, {}) == 1.0


@pytest.mark.parametrize("metric", [VqaAccuracy(), VqaAccuracySimple()], ids=lambda metric: metric.name)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 10])
def test_the_answer_that_everyone_gave_scores_one_however_few_they_are(
    metric: VqaAccuracy | VqaAccuracySimple, count: int
) -> None:
    assert metric.score("red", ["red"] * count, {}) == 1.0
    assert metric.score("blue", ["red"] * count, {}) == 0.0


def test_a_single_answer_is_normalised() -> None:
    assert VqaAccuracy().score("The Cat.", ["cat"], {}) == 1.0


def test_the_closed_form_is_the_mean_over_the_people_left_out() -> None:
    for count in range(4, 13):
        for matches in range(count + 1):
            agree = [True] * matches + [False] * (count - matches)
            sets = [sum(agree) - left_out for left_out in agree]
            mean = sum(min(found / 3, 1) for found in sets) / count
            assert leave_one_out_accuracy(matches, count) == pytest.approx(mean)


def test_the_contraction_table_only_puts_one_apostrophe_back() -> None:
    assert len(CONTRACTIONS) == 114
    odd = [lacking for lacking, word in CONTRACTIONS.items() if len(word) != len(lacking) + 1]
    assert odd == ["somebody'd"]
    assert all(lacking == lacking.lower() for lacking in CONTRACTIONS)


def test_more_periods_than_the_official_code_removes_stay() -> None:
    assert normalise_vqa_answer("x" + "." * 40) == "x" + "." * 8


@given(st.text(max_size=30))
def test_a_normalised_answer_has_single_spaces_and_no_articles(text: str) -> None:
    words = normalise_vqa_answer(text).split()
    assert " ".join(words) == normalise_vqa_answer(text)
    assert not {"a", "an", "the"} & set(words)


@given(st.sampled_from(["yes", "no", "Yes.", "a yes", "2", "two"]), st.data())
def test_official_accuracy_takes_one_of_five_values_and_ignores_the_order(prediction: str, data: st.DataObject) -> None:
    people = data.draw(st.lists(st.sampled_from(["yes", "no", "Yes", "two", "2"]), min_size=10, max_size=10))
    shuffled = data.draw(st.permutations(people))
    accuracy = VqaAccuracy().score(prediction, people, {})
    assert round(accuracy, 9) in (0.0, 0.3, 0.6, 0.9, 1.0)
    assert VqaAccuracy().score(prediction, shuffled, {}) == accuracy
