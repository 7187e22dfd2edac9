from __future__ import annotations

import math
import sys

import pytest
import sacrebleu

from brim.errors import RequestError
from brim.metrics.bleu import Bleu
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
