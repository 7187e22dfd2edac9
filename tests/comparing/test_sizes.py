"""The table of compared sizes: rows, sizes that do not fit, and when a size is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from brim.comparing.rounds import RoundRules
from brim.comparing.sizes import ComparedSizes, measure_sizes, oom_risk, too_short
from brim.errors import DoesNotFitError

QUICK = RoundRules(most=3)
NOISE = (1.0, 1.002, 0.999, 1.001)


def compared(rates: Mapping[int, float | None], *, noise: tuple[float, ...] = NOISE, **figures: Any) -> ComparedSizes:
    """Sizes with these rates, each measurement a little off; None does not fit."""
    table = ComparedSizes(list(rates), rules=QUICK)
    turns = dict.fromkeys(rates, 0)

    def measure(size: int, first: bool) -> dict[str, Any]:
        assert first == (turns[size] == 0)
        turns[size] += 1
        rate = rates[size]
        if rate is None:
            raise DoesNotFitError(f"{size} is too large\nWhat may help: less")
        return {"samples_per_second": rate * noise[(turns[size] + size) % len(noise)], **figures}

    measure_sizes(table, measure, lambda line: None)
    return table


def test_the_smallest_size_within_the_tolerance_of_the_best_is_recommended() -> None:
    table = compared({1: 10, 8: 80, 16: 99, 32: 100})
    found = table.recommendation()
    assert (found["clear"], found["batch_size"]) == (True, 16)
    assert [row["speed_up"] for row in table.rows()] == pytest.approx([1, 8, 9.9, 10], rel=0.01)
    assert table.rows()[0]["clear"] is None
    assert all(
        row["clear"] and row["speed_up_low"] < row["speed_up"] < row["speed_up_high"] for row in table.rows()[1:]
    )
    assert all(row["rounds"] == len(row["rates"]) == 3 for row in table.rows())


def test_noise_larger_than_the_difference_recommends_nothing_and_says_what_helps() -> None:
    table = compared({8: 95, 17: 100}, noise=(0.7, 1.3, 1.0, 0.8))
    found = table.recommendation()
    assert (found["clear"], found["batch_size"]) == (False, None)
    assert "against" in found["text"]
    assert "more samples" in found["text"]
    assert table.rows()[1]["clear"] is False


def test_a_size_that_does_not_fit_is_a_row_with_its_reason() -> None:
    table = compared({4: 10, 64: 50, 4096: None})
    rows = table.rows()
    assert [row.get("failed") for row in rows] == [None, None, "4096 is too large"]
    assert (rows[2]["speed_up"], rows[2]["samples_per_second"], rows[2]["risk"]) == (None, None, "does not fit")
    assert table.recommendation()["batch_size"] == 64


def test_the_speed_up_is_over_the_first_size_that_ran() -> None:
    rows = compared({4096: None, 4: 10, 8: 20}).rows()
    assert rows[1]["speed_up"] == 1.0
    assert rows[2]["speed_up"] == pytest.approx(2, rel=0.01)


def test_no_size_that_fits_is_no_recommendation() -> None:
    found = compared({8: None, 16: None}).recommendation()
    assert (found["clear"], found["batch_size"]) == (False, None)


def test_few_samples_are_never_clear() -> None:
    table = compared({1: 10, 64: 185}, too_short="36 samples are only 1 batch of 64")
    row = table.rows()[1]
    assert (row["clear"], row["unclear_because"]) == (False, "36 samples are only 1 batch of 64")
    assert table.recommendation()["batch_size"] is None


def test_a_comparison_that_was_stopped_has_the_rows_until_then() -> None:
    table = ComparedSizes([1, 2, 4])

    def measure(size: int, first: bool) -> dict[str, Any]:
        if size == 4:
            raise KeyboardInterrupt
        return {"samples_per_second": 1.0 * size}

    with pytest.raises(KeyboardInterrupt):
        measure_sizes(table, measure, lambda line: None)
    assert [row["batch_size"] for row in table.rows()] == [1, 2]


@pytest.mark.parametrize(
    ("samples", "size", "short"), [(36, 64, True), (100, 32, False), (96, 32, True), (4, 1, False), (3, 1, True)]
)
def test_four_batches_make_a_steady_rate(samples: int, size: int, short: bool) -> None:
    assert (too_short(samples, size, batches=4) is not None) == short


@pytest.mark.parametrize(
    ("row", "risk"),
    [
        ({"failed": "x"}, "does not fit"), ({"oom_events": 1, "headroom_fraction": 0.5}, "ran out, survived"),
        ({"headroom_fraction": 0.5}, "low"), ({"headroom_fraction": 0.15}, "medium"),
        ({"headroom_fraction": 0.05}, "high"), ({}, "unknown"),
    ],
)  # fmt: skip
def test_the_risk_follows_the_memory_that_is_left(row: dict[str, Any], risk: str) -> None:
    assert oom_risk(row) == risk
