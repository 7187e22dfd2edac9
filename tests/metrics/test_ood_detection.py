from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from brim.errors import RequestError
from brim.metrics.ood_detection import aupr, auroc, detection_metrics, fpr_at_recall

# Few distinct values: most samples tie with others.
scores = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=30)


def labelled(inner: list[float], outer: list[float]) -> tuple[Any, Any]:
    return np.array([0] * len(inner) + [1] * len(outer)), np.array(inner + outer)


@given(scores, scores)
def test_auroc_equals_scikit_learn_with_ties(inner: list[float], outer: list[float]) -> None:
    assert auroc(inner, outer) == pytest.approx(roc_auc_score(*labelled(inner, outer)), abs=1e-12)


@given(scores, scores)
def test_aupr_equals_scikit_learn_with_ties(inner: list[float], outer: list[float]) -> None:
    assert aupr(inner, outer) == pytest.approx(average_precision_score(*labelled(inner, outer)), abs=1e-12)


@given(scores, scores)
def test_fpr95_is_read_off_the_same_curve_as_scikit_learn(inner: list[float], outer: list[float]) -> None:
    labels, values = labelled(inner, outer)
    false, true, _ = roc_curve(1 - labels, -values, drop_intermediate=False)  # in is what is kept
    assert fpr_at_recall(inner, outer) == pytest.approx(false[true >= 0.95].min(), abs=1e-12)


def test_a_perfect_and_a_useless_detector() -> None:
    assert detection_metrics([0.0, 1.0], [2.0, 3.0]) == {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}
    assert detection_metrics([2.0, 3.0], [0.0, 1.0])["auroc"] == 0.0
    assert detection_metrics([1.0] * 4, [1.0] * 4) == {"auroc": 0.5, "aupr": 0.5, "fpr95": 1.0}


def test_ties_are_not_broken_by_the_order_of_the_samples() -> None:
    assert auroc([1.0, 1.0, 0.0], [1.0]) == auroc([0.0, 1.0, 1.0], [1.0]) == 2 / 3


def test_fpr95_keeps_at_least_95_of_100() -> None:
    inner = [float(number) for number in range(100)]
    assert fpr_at_recall(inner, [94.0, 94.5]) == 0.5  # the 95th score is 94, and a tie with it is kept
    assert fpr_at_recall(inner, [94.0, 94.5], recall=0.96) == 1.0


def test_fpr95_of_twenty_keeps_nineteen() -> None:
    inner = [float(number) for number in range(20)]
    assert fpr_at_recall(inner, [18.0, 19.0]) == 0.5


def test_infinite_scores_are_ranks_like_any_other() -> None:
    assert auroc([-math.inf, 0.0], [math.inf]) == 1.0


def test_half_precision_scores_are_compared_as_they_are() -> None:
    assert auroc(np.array([1.0], np.float16), np.array([1.0], np.float16)) == 0.5


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ([], [1.0], "no in-distribution scores"),
        ([1.0], [], "no out-of-distribution scores"),
        ([1.0], [math.nan], "1 of the out-of-distribution scores are not numbers"),
        ([[1.0]], [1.0], "in-distribution scores have the shape"),
    ],
)
def test_what_cannot_be_ranked_is_refused(inner: Any, outer: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        auroc(inner, outer)


def test_a_recall_outside_its_range_is_refused() -> None:
    with pytest.raises(RequestError, match=r"recall 1\.5"):
        fpr_at_recall([1.0], [2.0], recall=1.5)
