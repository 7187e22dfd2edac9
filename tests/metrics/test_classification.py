"""Top-k accuracy and multiple choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.metrics.classification import ChoiceAccuracy, ChoiceAccuracyNormalised, TopK

SCORES = [0.05, 0.3, 0.1, 0.25, 0.2, 0.06, 0.04]  # best first: 1 3 4 2 5 0 6


@pytest.mark.parametrize(
    ("reference", "top1", "top5"), [(1, 1, 1), (3, 0, 1), (5, 0, 1), (0, 0, 0), (6, 0, 0), ("1", 1, 1)]
)
def test_class_scores(reference: Any, top1: float, top5: float) -> None:
    assert TopK(1).score(SCORES, [reference]) == top1
    assert TopK(5).score(SCORES, [reference]) == top5


def test_ranked_labels_best_first() -> None:
    assert TopK(1).score(["cat", "dog"], ["cat"]) == 1
    assert TopK(1).score(["cat", "dog"], ["dog"]) == 0
    assert TopK(5).score(["cat", "dog"], ["dog"]) == 1
    assert TopK(1).score([4, 2], [2]) == 0
    assert TopK(2).score([4, 2], [2]) == 1


def test_a_single_label_is_the_only_prediction() -> None:
    assert TopK(5).score("cat", ["cat"]) == 1
    assert TopK(5).score(3, [3]) == 1


def test_labels_with_scores_are_ranked() -> None:
    assert TopK(1).score({"cat": 0.2, "dog": 0.8}, ["dog"]) == 1
    assert TopK(1).score({"cat": 0.2, "dog": 0.8}, ["cat"]) == 0


def test_class_names_come_from_the_sample() -> None:
    sample = {"classes": ["cat", "dog", "cow"]}
    assert TopK(1).score([0.1, 0.8, 0.1], ["dog"], sample) == 1
    assert TopK(1).score([0.1, 0.8, 0.1], ["cow"], sample) == 0
    with pytest.raises(RequestError, match="2 class scores for 3 class names"):
        TopK(1).score([0.1, 0.9], ["dog"], sample)


def test_of_equal_scores_the_first_is_taken() -> None:
    assert TopK(1).score([0.5, 0.5], [0]) == 1
    assert TopK(1).score([0.5, 0.5], [1]) == 0


def test_nan_is_wrong() -> None:
    assert TopK(5).score([math.nan, 0.5], [1]) == 0


def test_k_is_at_least_one() -> None:
    with pytest.raises(RequestError, match="k is 0"):
        TopK(0)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.data())
def test_a_larger_k_never_scores_less(scores: list[float], data: st.DataObject) -> None:
    reference = data.draw(st.integers(0, len(scores) - 1))
    hits = [TopK(k).score(scores, [reference]) for k in range(1, len(scores) + 1)]
    assert hits == sorted(hits)
    assert hits[-1] == 1


OPTIONS = {"options": ["red", "dark blue", "green"]}


@pytest.mark.parametrize("reference", [1, "1", "B", "b", "dark blue"])
def test_the_reference_is_a_position_a_letter_or_the_text(reference: Any) -> None:
    assert ChoiceAccuracy().score([-5.0, -2.0, -3.0], [reference], OPTIONS) == 1
    assert ChoiceAccuracy().score([-1.0, -2.0, -3.0], [reference], OPTIONS) == 0


def test_an_option_text_takes_precedence_over_its_letter_or_number() -> None:
    assert ChoiceAccuracy().score([-5.0, -1.0], ["A"], {"options": ["B", "A"]}) == 1
    assert ChoiceAccuracy().score([-5.0, -1.0], ["0"], {"options": ["1", "0"]}) == 1
    assert ChoiceAccuracy().score([-5.0, -1.0], [0], {"options": ["1", "0"]}) == 0  # a number is a position


def test_length_normalised_divides_by_bytes_or_by_the_lengths_given() -> None:
    likelihoods = [-3.0, -4.0, -9.0]  # by bytes: −1, −0.44, −1.8
    assert ChoiceAccuracy().score(likelihoods, ["red"], OPTIONS) == 1
    assert ChoiceAccuracyNormalised().score(likelihoods, ["red"], OPTIONS) == 0
    assert ChoiceAccuracyNormalised().score(likelihoods, ["dark blue"], OPTIONS) == 1
    tokens = {**OPTIONS, "option_lengths": [1, 1, 30]}
    assert ChoiceAccuracyNormalised().score(likelihoods, ["green"], tokens) == 1


def test_equal_options_take_the_first_and_nan_is_wrong() -> None:
    assert ChoiceAccuracy().score([-1.0, -1.0], [0]) == 1
    assert ChoiceAccuracy().score([-1.0, -1.0], [1]) == 0
    assert ChoiceAccuracy().score([math.nan, -1.0], [1]) == 0
    assert ChoiceAccuracy().score([-math.inf, -1.0], [1]) == 1


@pytest.mark.parametrize(
    ("prediction", "reference", "sample", "message"),
    [
        ([-1.0, -2.0], 2, {}, "the reference is 2; with 2 options it must be a position from 0 to 1"),
        ([-1.0, -2.0], "C", {}, "the reference is 'C'"),
        ([-1.0, -2.0], -1, {}, "the reference is -1"),
        ([-1.0, -2.0, -3.0], "pink", OPTIONS, "the reference is 'pink'.*'dark blue'"),
        ([-1.0, -2.0], 0, OPTIONS, "2 log-likelihoods for 3 options"),
        ("red", 0, OPTIONS, "the prediction is str, not one log-likelihood per option"),
    ],
)
def test_mismatched_predictions_and_options_are_refused(
    prediction: Any, reference: Any, sample: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ChoiceAccuracy().score(prediction, [reference], sample)


def test_length_normalised_needs_lengths() -> None:
    with pytest.raises(RequestError, match="neither options nor option_lengths"):
        ChoiceAccuracyNormalised().score([-1.0, -2.0], [0])
    with pytest.raises(RequestError, match="2 log-likelihoods for 1 lengths"):
        ChoiceAccuracyNormalised().score([-1.0, -2.0], [0], {"option_lengths": [1]})
