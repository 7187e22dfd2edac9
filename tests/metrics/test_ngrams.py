"""BLEU, ROUGE-L and CIDEr-D."""

from __future__ import annotations

import math
import sys

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from brim.errors import RequestError
from brim.metrics import ngrams
from brim.metrics.ngrams import Bleu, Cider, RougeL, cider_d, words_of
from brim.metrics.registry import get_metric


def figures(predictions: list[str | None], references: list[list[str]]) -> dict[str, float]:
    metric = Bleu()
    scores = [metric.score(prediction, each) for prediction, each in zip(predictions, references, strict=True)]
    return metric.aggregate(scores, predictions, references)


def test_the_runs_figure_is_sacrebleus_corpus_score() -> None:
    predictions = ["the cat sat on a mat today", "a dog in the park, I think"]
    references = ["the cat sat on the mat today", "there is a dog in the park"]
    expected = sacrebleu.corpus_bleu(predictions, [references]).score / 100
    result = figures([*predictions], [[text] for text in references])
    assert result["value"] == pytest.approx(expected)
    assert result["value"] != pytest.approx(result["mean"])  # it is no mean of sentences


def test_bleu_by_hand() -> None:
    # 7 words, one wrong at place 5: matches 6/7, 4/6, 2/5, 1/4; equal lengths, so no brevity penalty
    value = figures(["the cat sat on a mat today"], [["the cat sat on the mat today"]])["value"]
    assert value == pytest.approx(math.exp(sum(math.log(p) for p in (6 / 7, 4 / 6, 2 / 5, 1 / 4)) / 4))


def test_samples_may_have_different_numbers_of_references() -> None:
    predictions = ["a small dog runs in the park", "the sky is very blue today"]
    references = [["a dog runs in a park", "a small dog runs in the park"], ["the sky is very blue today"]]
    assert figures([*predictions], references)["value"] == pytest.approx(1.0)


def test_a_failed_sample_is_an_empty_text_in_the_corpus() -> None:
    text = "a small dog runs in the park"
    with_failure = figures([text, None], [[text], [text]])
    assert with_failure["value"] == pytest.approx(math.exp(1 - 2))  # brevity penalty: 14 words wanted, 7 given
    assert with_failure["mean"] == pytest.approx(0.5)
    assert figures([None], [[text]])["value"] == 0.0


def test_short_answers_have_a_sentence_score_but_no_corpus_bleu() -> None:
    result = figures(["yes"], [["yes"]])
    assert result["mean"] == pytest.approx(1.0)
    assert result["value"] == 0.0


def test_without_the_library_asking_for_bleu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(RequestError, match=r"metric bleu needs the library sacrebleu .*: pip install sacrebleu"):
        get_metric("bleu")


def test_rouge_l_by_hand() -> None:
    # longest common subsequence: the cat on the mat = 5 of 6 words on either side
    assert RougeL().score("the cat sat on the mat", ["the cat lay on the mat"]) == pytest.approx(5 / 6)


def test_order_matters_and_case_does_not() -> None:
    assert RougeL().score("mat the", ["The mat"]) == pytest.approx(0.5)
    assert RougeL().score("THE MAT!", ["the mat"]) == pytest.approx(1.0)


def test_the_best_reference_counts_and_agrees_with_the_library() -> None:
    prediction, references = "a man rides a brown horse", ["a person on a horse", "a man is riding a horse"]
    expected = max(RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure for reference in references)
    assert RougeL().score(prediction, references) == pytest.approx(expected)


def test_words_are_not_stemmed() -> None:
    assert RougeL().score("riding", ["rides"]) == 0.0


def test_without_the_library_asking_for_rouge_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    ngrams._rouge_scorer.cache_clear()
    with pytest.raises(RequestError, match=r"metric rouge_l needs the library rouge-score .*: pip install rouge"):
        get_metric("rouge")


DOG, SKY = "a dog runs fast", "the sky looks blue"


def test_the_words_are_lower_case_without_punctuation() -> None:
    assert words_of("A man's dog, on_2 skate-boards.") == ["a", "man's", "dog", "on", "2", "skate", "boards"]


def test_the_same_caption_scores_ten_and_another_zero() -> None:
    assert cider_d([DOG, SKY], [[DOG], [SKY]]) == pytest.approx([10, 10])
    assert cider_d([SKY, DOG], [[DOG], [SKY]]) == pytest.approx([0, 0])


def test_a_single_sample_scores_zero() -> None:
    assert cider_d([DOG], [[DOG]]) == [0.0]


def test_three_of_four_words_by_hand() -> None:
    # every reference n-gram has idf log 2; "slow" is in no reference and also has log(2) − log(max(0, 1)) = log 2
    # unigrams 3/4, bigrams 2/3, trigrams 1/2, 4-grams 0; equal lengths
    score = cider_d(["a dog runs slow", SKY], [[DOG], [SKY]])[0]
    assert score == pytest.approx(10 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4)


def test_a_word_in_every_sample_has_no_weight() -> None:
    # "a" has idf 0: the vectors are {dog} and {dog, runs} among the unigrams, {a dog} and {a dog, dog runs} after
    references = [["a dog runs"], ["a blue sky"]]
    length = math.exp(-(1**2) / (2 * 36))
    assert cider_d(["a dog", "x"], references)[0] == pytest.approx(10 * (2 / math.sqrt(2)) / 4 * length)


def test_repeating_a_word_does_not_raise_the_score() -> None:
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
