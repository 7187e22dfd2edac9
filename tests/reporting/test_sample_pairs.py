"""Two runs on the same samples: the paired difference, and which answers turned."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from brim.reporting.kinds.sample_pairs import EXAMPLES, difference_of, pair_samples
from tests.reported_runs import sample_line


def lines(scores: list[float], **more: Any) -> list[dict[str, Any]]:
    return [sample_line(number, score, **more) for number, score in enumerate(scores)]


def test_the_difference_has_the_interval_of_paired_differences() -> None:
    first, second = [1.0, 0.0, 0.6, 1.0, 0.0], [1.0, 1.0, 0.6, 0.0, 0.3]
    paired = pair_samples(lines(first), lines(second), ["vqa", "bleu"])
    changes = [after - before for before, after in zip(first, second, strict=True)]
    assert paired.changes == {"vqa": changes, "bleu": []}
    change = difference_of(paired.changes["vqa"])
    assert change is not None
    assert change["difference"] == pytest.approx(statistics.fmean(changes))
    assert change["ci95"] == pytest.approx(1.959964 * statistics.stdev(changes) / math.sqrt(5))
    assert change["count"] == 5
    assert difference_of([]) is None


def test_samples_are_matched_by_id_whatever_their_order() -> None:
    paired = pair_samples(
        lines([1.0, 0.0, 1.0, 0.3]), [*reversed(lines([0.0, 0.0, 1.0])), sample_line(9, 1.0)], ["vqa"]
    )
    assert (paired.common, paired.only_first, paired.only_second) == (3, 1, 1)
    assert sorted(paired.changes["vqa"]) == [-1.0, 0.0, 0.0]


def test_an_id_that_comes_twice_is_matched_in_turn() -> None:
    twice = [sample_line(1, 1.0), sample_line(1, 0.0)]
    assert pair_samples(twice, twice, ["vqa"]).changes["vqa"] == [0.0, 0.0]


def test_answers_that_turned_are_counted_and_the_first_shown() -> None:
    first, second = lines([1.0, 0.0, 0.6, 0.3, 1.0]), lines([1.0, 1.0, 0.3, 0.0, 0.0], prediction="three")
    second[0]["prediction"] = "two"
    agreement = pair_samples(first, second, ["vqa"]).agreement("vqa")
    counts = {name: agreement[name] for name in ("both_right", "both_wrong", "gained", "lost", "same_prediction")}
    assert counts == {"both_right": 1, "both_wrong": 1, "gained": 1, "lost": 2, "same_prediction": 1}
    assert [one["id"] for one in agreement["examples"]["lost"]] == ["q2", "q4"]
    assert agreement["examples"]["gained"][0]["second"] == {"prediction": "three", "score": 1.0}
    many = pair_samples(lines([1.0] * 50), lines([0.0] * 50), ["vqa"])
    assert (many.lost, len(many.examples["lost"])) == (50, EXAMPLES)


def test_a_line_without_scores_is_paired_but_has_no_difference() -> None:
    paired = pair_samples(lines([1.0]), [{"id": "q0", "prediction": "two", "scores": "none"}], ["vqa"])
    assert (paired.common, paired.same_prediction, paired.changes) == (1, 1, {"vqa": []})
