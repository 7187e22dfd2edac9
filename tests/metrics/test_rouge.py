from __future__ import annotations

import sys

import pytest
from rouge_score.rouge_scorer import RougeScorer

from brim.errors import RequestError
from brim.metrics import rouge
from brim.metrics.registry import get_metric
from brim.metrics.rouge import RougeL


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
    rouge._scorer.cache_clear()
    with pytest.raises(RequestError, match=r"metric rouge_l needs the library rouge-score .*: pip install rouge"):
        get_metric("rouge")
