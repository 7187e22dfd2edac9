"""Turns and intervals of repeated measurements: who is measured when, and when it is enough."""

from __future__ import annotations

import itertools

import pytest

from brim.comparing.rounds import MeasuredRounds, RoundRules, Turn


def filled(rates: list[list[float]], **rules: float) -> MeasuredRounds:
    """MeasuredRounds in which each setting has these rates, one in each round; a clock that counts its readings."""
    clock = itertools.count()
    rounds = MeasuredRounds(len(rates), rules=RoundRules(**rules), clock=lambda: float(next(clock)))  # type: ignore[arg-type]
    for turn in rounds:
        rounds.record(turn, rates[turn.place][min(turn.number, len(rates[turn.place]) - 1)])
    return rounds


def test_everything_is_warmed_up_once_and_then_measured_in_turns() -> None:
    rounds = MeasuredRounds(3, rules=RoundRules(most=3))
    turns = list(rounds)
    assert [turn.place for turn in turns] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    assert [turn.number for turn in turns if turn.place == 1] == [0, 1, 2, 3]
    assert [turn.counts for turn in turns[:4]] == [False, False, False, True]


def test_a_warm_up_does_not_count() -> None:
    assert filled([[1.0, 10.0], [1000.0, 20.0]], most=3).rates(1) == [20.0, 20.0, 20.0]


def test_three_rounds_are_enough_where_the_interval_is_narrow() -> None:
    rounds = filled([[100, 100, 101, 100], [200, 200, 202, 199]])
    assert len(rounds.rates(0)) == 3
    gain = rounds.speed_up(1)
    assert gain is not None
    assert gain.clear
    assert gain.value == pytest.approx(2, rel=0.02)


def test_a_wide_interval_is_measured_again_until_the_most_rounds() -> None:
    noisy = [[100, 100, 60, 130, 80, 100, 70], [100, 90, 130, 60, 110, 80, 120]]
    rounds = filled([[float(rate) for rate in one] for one in noisy], most=6)
    assert len(rounds.rates(0)) == 6
    gain = rounds.speed_up(1)
    assert gain is not None
    assert not gain.clear


def test_no_round_is_begun_that_would_exceed_the_time() -> None:
    noisy = [[100.0, 50.0, 150.0, 100.0, 20.0], [100.0, 150.0, 50.0, 30.0, 100.0]]
    assert len(filled(noisy, seconds=0.0).rates(0)) == 3


def test_equally_fast_settings_end_without_the_most_rounds() -> None:
    assert len(filled([[100.0], [100.1]]).rates(0)) == 3


def test_what_slows_a_whole_round_down_leaves_the_ratio_clear() -> None:
    rounds = filled([[100, 100, 50, 20], [200, 200, 100, 40]], most=3)
    gain, rate = rounds.speed_up(1), rounds.rate(1)
    assert gain is not None
    assert rate is not None
    assert (gain.low, gain.high) == (pytest.approx(2), pytest.approx(2))
    assert rate.low is not None
    assert rate.low < 60 < rate.value  # the rate itself is anything but sure


def test_a_setting_that_fails_has_no_further_turns_and_is_no_reference() -> None:
    rounds = MeasuredRounds(2, rules=RoundRules(most=3))
    places = []
    for turn in rounds:
        places.append(turn.place)
        if turn.place == 0:
            rounds.fail(turn)
        else:
            rounds.record(turn, 5.0)
    assert places == [0, 1, 1, 1, 1]
    assert (rounds.reference, rounds.rates(0), rounds.speed_up(0)) == (1, [], None)


def test_what_is_measured_once_has_no_bounds() -> None:
    rounds = MeasuredRounds(2)
    rounds.record(Turn(0, 1), 10.0)
    rounds.record(Turn(1, 1), 20.0)
    gain = rounds.speed_up(1)
    assert gain is not None
    assert (gain.value, gain.low, gain.clear) == (2.0, None, False)
