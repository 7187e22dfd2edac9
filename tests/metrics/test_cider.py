from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.metrics.cider import Cider, cider_d, words_of

DOG, SKY = "a dog runs fast", "the sky looks blue"


def test_the_words_are_lower_case_without_punctuation() -> None:
    assert words_of("A man's dog, on_2 skate-boards.") == ["a", "man's", "dog", "on", "2", "skate", "boards"]


def test_the_same_caption_scores_ten_and_another_zero() -> None:
    assert cider_d([DOG, SKY], [[DOG], [SKY]]) == pytest.approx([10, 10])
    assert cider_d([SKY, DOG], [[DOG], [SKY]]) == pytest.approx([0, 0])


def test_one_sample_has_nothing_rare() -> None:
    assert cider_d([DOG], [[DOG]]) == [0.0]


def test_three_of_four_words_by_hand() -> None:
    # every reference n-gram has idf log 2; "slow" is in no reference and also has log(2) − log(max(0, 1)) = log 2
    # unigrams 3/4, bigrams 2/3, trigrams 1/2, 4-grams 0; equal lengths
    score = cider_d(["a dog runs slow", SKY], [[DOG], [SKY]])[0]
    assert score == pytest.approx(10 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4)


def test_a_word_in_every_sample_weighs_nothing() -> None:
    # "a" has idf 0: the vectors are {dog} and {dog, runs} among the unigrams, {a dog} and {a dog, dog runs} after
    references = [["a dog runs"], ["a blue sky"]]
    length = math.exp(-(1**2) / (2 * 36))
    assert cider_d(["a dog", "x"], references)[0] == pytest.approx(10 * (2 / math.sqrt(2)) / 4 * length)


def test_repeating_a_word_does_not_pay() -> None:
    # count clipped to 1: log² / (3 log · 2 log) = 1/6 over unigrams; 3 words against 4
    once = cider_d(["dog dog dog", SKY], [["a dog runs fast"], [SKY]])[0]
    assert once == pytest.approx(10 * (1 / 6) / 4 * math.exp(-1 / 72))


def test_references_are_averaged() -> None:
    assert cider_d([DOG, SKY], [[DOG, "two cats sleep here"], [SKY]])[0] == pytest.approx(5)


def test_a_missing_caption_is_zero_and_stays() -> None:
    assert cider_d([None, SKY], [[DOG], [SKY]]) == pytest.approx([0, 10])
    figures = Cider().aggregate([0.0, 1.0], [None, SKY], [[DOG], [SKY]])
    assert figures["value"] == pytest.approx(5)
    assert figures["count"] == 2


def test_a_samples_own_score_has_no_idf() -> None:
    assert Cider().score(DOG, [DOG]) == pytest.approx(1.0)
    assert Cider().score("a dog", ["a dog"]) == pytest.approx(0.5)  # no trigram, no 4-gram


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(RequestError, match="1 predictions for 2 lists of references"):
        cider_d([DOG], [[DOG], [SKY]])


captions = st.lists(st.sampled_from(["a", "dog", "runs", "fast", "sky"]), max_size=6).map(" ".join)


@given(st.lists(st.tuples(captions, st.lists(captions, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_scores_lie_between_zero_and_ten_and_ignore_the_order_of_samples(
    samples: list[tuple[str, list[str]]],
) -> None:
    scores = cider_d([given_text for given_text, _ in samples], [wanted for _, wanted in samples])
    assert all(0 <= score <= 10 + 1e-9 for score in scores)
    backwards = samples[::-1]
    again = cider_d([given_text for given_text, _ in backwards], [wanted[::-1] for _, wanted in backwards])
    assert again[::-1] == pytest.approx(scores)
