"""What every metric must do, the built-in ones and any that is added."""

from __future__ import annotations

import math
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.errors import RequestError
from brim.metrics.base import Metric, mean_and_spread
from brim.metrics.registry import get_metric, metric_names

TEXT_METRICS = [name for name in metric_names() if not name.startswith(("top", "choice"))]
words = st.text(string.ascii_letters + string.digits + " .,'-!\n", min_size=1, max_size=40)
real_words = st.lists(st.sampled_from(["dog", "Red", "2", "don't", "on", "grass", "sky"]), min_size=4, max_size=8)


def example(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """A right prediction, its references, its sample."""
    if name.startswith("top"):
        return [0.1, 0.7, 0.2], [1], {"id": 7}
    if name.startswith("choice"):
        return [-3.0, -1.0], [1], {"id": 7, "options": ["red", "sky"]}
    return "a dog on the grass", ["a dog on the grass"], {"id": 7}


@pytest.mark.parametrize("name", metric_names())
class TestEveryMetric:
    def test_it_is_found_by_its_name(self, name: str) -> None:
        assert isinstance(get_metric(name), Metric)
        assert get_metric(name).name == name

    def test_the_right_answer_scores_one(self, name: str) -> None:
        assert get_metric(name).score(*example(name)) == pytest.approx(1.0)

    @pytest.mark.parametrize("nothing", [None, "", " \n", []])
    def test_a_missing_answer_scores_zero(self, name: str, nothing: Any) -> None:
        _, references, sample = example(name)
        assert get_metric(name).score(nothing, references, sample) == 0.0

    def test_a_failed_sample_counts_in_the_result_of_the_run(self, name: str) -> None:
        metric = get_metric(name)
        prediction, references, sample = example(name)
        other = ["the sky is very blue today"] if name in TEXT_METRICS else references
        good = prediction if name not in TEXT_METRICS else other[0]
        runs = []
        for first in (prediction, None):
            scores = [metric.score(first, references, sample), metric.score(good, other, sample)]
            runs.append(metric.aggregate(scores, [first, good], [references, other]))
        whole, with_failure = runs
        assert with_failure["count"] == whole["count"] == 2
        assert with_failure["value"] < whole["value"]
        assert with_failure["mean"] == pytest.approx(whole["mean"] / 2)

    def test_no_reference_is_refused_with_the_samples_id(self, name: str) -> None:
        prediction, _, sample = example(name)
        for references in ([], None, [None]):
            with pytest.raises(RequestError, match=rf"metric {name}: sample 7 has no reference"):
                get_metric(name).score(prediction, references, sample)

    def test_the_result_of_a_run_has_a_value_and_the_spread_of_the_scores(self, name: str) -> None:
        prediction, references, sample = example(name)
        metric = get_metric(name)
        figures = metric.aggregate([metric.score(prediction, references, sample)], [prediction], [references])
        assert list(figures) == ["value", "mean", "std", "count", "ci95"]
        assert metric.corpus_level or figures["value"] == figures["mean"]


@pytest.mark.parametrize("name", TEXT_METRICS)
class TestEveryTextMetric:
    @given(prediction=words, references=st.lists(words, min_size=1, max_size=4), data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_scores_lie_between_zero_and_one_whatever_the_order(
        self, name: str, prediction: str, references: list[str], data: st.DataObject
    ) -> None:
        metric = get_metric(name)
        score = metric.score(prediction, references, {})
        assert 0 <= score <= 1
        assert metric.score(prediction, data.draw(st.permutations(references)), {}) == pytest.approx(score)

    @given(words=real_words)
    @settings(max_examples=25, deadline=None)
    def test_the_same_text_scores_one(self, name: str, words: list[str]) -> None:
        text = " ".join(words)
        assert get_metric(name).score(text, [text], {}) == pytest.approx(1.0)

    def test_a_single_reference_and_a_number_count_as_text(self, name: str) -> None:
        assert get_metric(name).score("a dog on the grass", "a dog on the grass", {}) == pytest.approx(1.0)
        assert get_metric(name).score(12, [12], {}) == get_metric(name).score("12", ["12"], {}) > 0


def test_mean_and_spread_by_hand() -> None:
    figures = mean_and_spread([0.0, 0.0, 1.0, 1.0])  # squares 4 × 0.25, over 3
    assert figures["mean"] == 0.5
    assert figures["std"] == pytest.approx(math.sqrt(1 / 3))
    assert figures["count"] == 4
    assert figures["ci95"] == pytest.approx(1.96 * math.sqrt(1 / 3) / 2, rel=1e-4)


def test_one_score_has_no_spread_and_none_is_refused() -> None:
    assert mean_and_spread([0.3]) == {"mean": 0.3, "std": 0.0, "count": 1, "ci95": 0.0}
    with pytest.raises(RequestError, match="no scores to average"):
        mean_and_spread([])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_mean_lies_within_the_scores(scores: list[float]) -> None:
    figures = mean_and_spread(scores)
    assert min(scores) - 1e-12 <= figures["mean"] <= max(scores) + 1e-12
    assert 0 <= figures["std"] <= 0.71
    assert figures["count"] == len(scores)


@pytest.mark.parametrize("wrong", [1.5, -0.1, math.nan])
def test_a_score_out_of_range_is_refused(wrong: float) -> None:
    class Wrong(Metric):
        name = "wrong"

        def compare(self, prediction: Any, references: Any, sample: Any) -> float:
            return wrong

    with pytest.raises(RequestError, match=r"metric wrong: scored .* for sample 'x'; a score lies between 0 and 1"):
        Wrong().score("text", ["text"], {"id": "x"})
