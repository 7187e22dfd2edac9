from __future__ import annotations

import math
from typing import Any

import pytest

from brim.errors import RequestError
from brim.metrics.choice import ChoiceAccuracy, ChoiceAccuracyNormalised

OPTIONS = {"options": ["red", "dark blue", "green"]}


@pytest.mark.parametrize("reference", [1, "1", "B", "b", "dark blue"])
def test_the_reference_is_a_position_a_letter_or_the_text(reference: Any) -> None:
    assert ChoiceAccuracy().score([-5.0, -2.0, -3.0], [reference], OPTIONS) == 1
    assert ChoiceAccuracy().score([-1.0, -2.0, -3.0], [reference], OPTIONS) == 0


def test_an_options_own_text_goes_before_its_letter_or_number() -> None:
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
def test_what_does_not_fit_together_is_refused(prediction: Any, reference: Any, sample: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChoiceAccuracy().score(prediction, [reference], sample)


def test_length_normalised_needs_lengths() -> None:
    with pytest.raises(RequestError, match="neither options nor option_lengths"):
        ChoiceAccuracyNormalised().score([-1.0, -2.0], [0])
    with pytest.raises(RequestError, match="2 log-likelihoods for 1 lengths"):
        ChoiceAccuracyNormalised().score([-1.0, -2.0], [0], {"option_lengths": [1]})
