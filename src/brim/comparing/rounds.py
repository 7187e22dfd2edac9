"""Whose turn it is, and how sure the result is: settings measured in turns, again and again.

What slows the machine down for a while slows neighbours of one round alike, so rates are compared round by round. The
first round warms up and does not count. Pure: it is given rates, and runs nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

from brim.intervals import Interval, mean_rate, paired_speed_up

__all__ = ["MeasuredRounds", "RoundRules", "Turn"]

NARROW = 1.1  # upper bound over lower one: an interval on one side of 1 that needs no further round
NO_DIFFERENCE = 1.04  # likewise of an interval around 1: the settings are equally fast


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRules:
    """How often everything is measured: `least` rounds in any case, more while an interval is wide and time is left."""

    least: int = 3
    most: int = 10
    seconds: float = 60.0  # for all rounds together; the least ones may take longer


@dataclasses.dataclass(frozen=True)
class Turn:
    """One measurement: of which setting, in which round; round 0 is the warm-up."""

    place: int
    number: int

    @property
    def counts(self) -> bool:
        """Whether it is more than a warm-up."""
        return self.number > 0


class MeasuredRounds:
    """Turns of `count` settings, of which the first that does not fail is the reference.

    rounds = MeasuredRounds(len(sizes))
    for turn in rounds:
        rounds.record(turn, measure(sizes[turn.place]))
    rounds.speed_up(1)
    """

    def __init__(
        self, count: int, *, rules: RoundRules | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self.failed: set[int] = set()
        self._rules, self._clock = rules or RoundRules(), clock
        self._rates: list[dict[int, float]] = [{} for _ in range(count)]  # by round

    def __iter__(self) -> Iterator[Turn]:
        started = before = self._clock()
        for number in itertools.count():
            now = self._clock()
            if number > self._rules.least and not self._another(number, now - started, now - before):
                return
            before = now
            order = range(self.count) if number % 2 == 0 else reversed(range(self.count))  # a drift cancels out
            for place in order:
                if place not in self.failed:
                    yield Turn(place, number)

    def _another(self, number: int, spent: float, last: float) -> bool:
        """Whether round `number` would help, and fits into the time."""
        if number > self._rules.most or spent + last > self._rules.seconds:
            return False
        return any(_is_wide(self.speed_up(place)) for place in self.measured() if place != self.reference)

    def record(self, turn: Turn, rate: float) -> None:
        """The rate of a turn, in samples per second."""
        if turn.counts:
            self._rates[turn.place][turn.number] = rate

    def fail(self, turn: Turn) -> None:
        """The setting of this turn gets no further turns; its rates do not count."""
        self.failed.add(turn.place)

    @property
    def reference(self) -> int | None:
        """What speed-ups are relative to; None: nothing is measured yet."""
        return next(iter(self.measured()), None)

    def measured(self) -> list[int]:
        """The settings with a rate, in their order."""
        return [place for place in range(self.count) if place not in self.failed and self._rates[place]]

    def rates(self, place: int) -> list[float]:
        """What was measured of a setting, round by round."""
        return [] if place in self.failed else [self._rates[place][number] for number in sorted(self._rates[place])]

    def rate(self, place: int) -> Interval | None:
        """Samples per second with their interval."""
        rates = self.rates(place)
        return mean_rate(rates) if rates else None

    def speed_up(self, place: int, over: int | None = None) -> Interval | None:
        """How many times as fast as another setting, by the rounds that both have; None: there are none."""
        other = self.reference if over is None else over
        if other is None or place in self.failed or other in self.failed:
            return None
        mine, others = self._rates[place], self._rates[other]
        shared = sorted(mine.keys() & others.keys())
        if not shared:
            return None
        return paired_speed_up([1 / others[number] for number in shared], [1 / mine[number] for number in shared])


def _is_wide(interval: Interval | None) -> bool:
    if interval is None or interval.low is None or interval.high is None:
        return True
    return interval.high > interval.low * (NARROW if interval.clear else NO_DIFFERENCE)
