"""Batch sizes compared: a row for each, with intervals and the reason where one does not fit, and a recommendation.

Knows neither how a size is measured nor where the table goes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from brim.comparing.rounds import MeasuredRounds, RoundRules, Turn
from brim.errors import DoesNotFitError, plural
from brim.intervals import Interval

__all__ = ["ComparedSizes", "interval_fields", "measure_sizes", "oom_risk", "too_short"]

TOLERANCE = 0.02  # of the best rate: what a smaller size may lack, as everywhere in brim
MOST_LACKING = 0.05  # what a recommended size may lack at the far end of its interval

Figures = dict[str, Any]


def measure_sizes(
    compared: ComparedSizes, measure: Callable[[int, bool], Mapping[str, Any]], note: Callable[[str], None]
) -> None:
    """Measure every size in turns; `measure` is given the size, and whether it is its first time.

    A size that does not fit (a `DoesNotFitError`, or `failed` among its figures) becomes a row with its reason. The
    warm-up has a note for each size, every round after it one for all.
    """
    for number, turns in itertools.groupby(compared.turns(), key=lambda one: one[0].number):
        rates: dict[int, str] = {}
        for turn, size in turns:
            try:
                figures = dict(measure(size, not turn.counts))
            except DoesNotFitError as error:
                figures = {"failed": str(error).splitlines()[0]}
            compared.record(turn, figures)
            if figures.get("failed"):
                note(f"batch {size}: {figures['failed']}")
            elif turn.counts:
                rates[turn.place] = f"batch {size} {figures['samples_per_second']:,.1f}"
            else:
                note(f"warm-up: batch {size} {figures['samples_per_second']:,.1f} samples/s")
        if rates:
            note(f"round {number}: {', '.join(rates[place] for place in sorted(rates))} samples/s")


class ComparedSizes:
    """The table of a comparison, filled turn by turn; complete at any time, so that a stopped one can be kept.

    `derive` adds what follows from a row's rate, such as the time of an epoch.
    """

    def __init__(
        self, sizes: Sequence[int], *, rules: RoundRules | None = None,
        derive: Callable[[Figures], Mapping[str, Any]] | None = None, more_samples: str = "more samples",
    ) -> None:  # fmt: skip
        self.sizes = tuple(sizes)
        self.rounds = MeasuredRounds(len(sizes), rules=rules)
        self._figures: list[list[Figures]] = [[] for _ in sizes]  # of every turn
        self._derive, self._more_samples = derive, more_samples

    def turns(self) -> Iterator[tuple[Turn, int]]:
        """Every turn with its size."""
        return ((turn, self.sizes[turn.place]) for turn in self.rounds)

    def record(self, turn: Turn, figures: Figures) -> None:
        """The figures of a turn; without a rate, or with `failed`, the size is not measured again."""
        self._figures[turn.place].append(figures)
        if figures.get("failed") or not figures.get("samples_per_second"):
            figures.setdefault("failed", "no sample was finished")
            self.rounds.fail(turn)
        else:
            self.rounds.record(turn, figures["samples_per_second"])

    def rows(self) -> list[Figures]:
        """One row for each size that had a turn, in the order asked for."""
        return [self._row(place) for place in range(len(self.sizes)) if self._figures[place]]

    def _row(self, place: int) -> Figures:
        turns = self._figures[place]
        merged: Figures = {}
        for figures in turns:  # later ones count; what only the first measured stays
            merged |= {name: value for name, value in figures.items() if value is not None or name not in merged}
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            merged[name] = max((one[name] for one in turns if one.get(name)), default=None)
        seconds = [one["seconds"] for one in turns[1:] or turns if one.get("seconds")]
        row = {"batch_size": self.sizes[place], **merged, **({"seconds": statistics.fmean(seconds)} if seconds else {})}
        rate = self.rounds.rate(place)
        reference = place == self.rounds.reference
        row |= interval_fields(
            rate, None if reference else self.rounds.speed_up(place), self.rounds.rates(place),
            because=row.pop("too_short", None),
        )  # fmt: skip
        if reference:
            row["speed_up"] = 1.0
        if rate is not None and self._derive is not None:
            row |= self._derive(row)
        row["risk"] = oom_risk(row)
        return row

    def recommendation(self) -> dict[str, Any]:
        """The smallest size within the tolerance of the best, if the measurements are clear; else what would help."""
        places = self.rounds.measured()
        if not places:
            return _unclear("no size was measured", "give smaller sizes, or more memory")
        rates = {place: interval.value for place in places if (interval := self.rounds.rate(place)) is not None}
        best = max(rates, key=lambda place: rates[place])
        good = [place for place in places if rates[place] >= (1 - TOLERANCE) * rates[best]]
        chosen = min(good, key=lambda place: self.sizes[place])
        size = self.sizes[chosen]
        short = next((why for one in self._figures[chosen] if (why := one.get("too_short"))), None)
        if short is not None:
            return _unclear(f"{size} looks best, but {short}", self._more_samples)
        if min(len(self.rounds.rates(place)) for place in places) < 2:
            return _unclear(f"{size} looks best, but it was measured once", "let all rounds end")
        doubt = self._doubt(chosen, best, places)
        if doubt is not None:
            return _unclear(doubt, f"{self._more_samples}, or a machine without other work")
        rivals = "the only size that ran" if len(places) == 1 else self._why(chosen, best)
        larger = max(self.sizes[place] for place in places) == size and len(places) > 1 and not self.rounds.failed
        more = "; larger sizes may be faster still" if larger else ""
        return {"clear": True, "batch_size": size, "text": f"batch size {size}: {rivals}{more}"}

    def _why(self, chosen: int, best: int) -> str:
        gain = self.rounds.speed_up(chosen)
        over = self.rounds.reference
        said = "" if gain is None or chosen == over else f", {gain.text()} over {self.sizes[over or 0]}"
        if chosen == best:
            return f"the best rate{said}"
        return f"the smallest within {TOLERANCE:.0%} of the best rate (that of {self.sizes[best]}){said}"

    def _doubt(self, chosen: int, best: int, places: Sequence[int]) -> str | None:
        """Why the choice is not clear: a smaller size may be as fast, or the best one much faster."""
        for place in places:
            if self.sizes[place] < self.sizes[chosen]:
                gain = self.rounds.speed_up(chosen, over=place)
                if gain is None or not (gain.clear and gain.value > 1):
                    return self._between(chosen, place, gain)
        ahead = self.rounds.speed_up(best, over=chosen)
        if best != chosen and (ahead is None or ahead.high is None or ahead.high > 1 + MOST_LACKING):
            return self._between(best, chosen, ahead)
        return None

    def _between(self, place: int, other: int, gain: Interval | None) -> str:
        known = "" if gain is None or gain.low is None else f": {gain.low:.2f} to {gain.high:.2f} times the rate"
        return f"{self.sizes[place]} against {self.sizes[other]} is not clear{known}"


def _unclear(why: str, remedy: str) -> dict[str, Any]:
    return {"clear": False, "batch_size": None, "text": f"not clear: {why}; what would help: {remedy}"}


def interval_fields(
    rate: Interval | None, gain: Interval | None, rates: Sequence[float], *, because: str | None = None
) -> dict[str, Any]:
    """The rate and the speed-up of a row with their intervals; `because`: why the speed-up is not clear at any rate."""
    clear = None if gain is None else gain.clear and because is None
    if clear is False and because is None and gain is not None and gain.low is None:
        because = "measured once"
    return {
        "samples_per_second": None if rate is None else rate.value,
        "samples_per_second_low": None if rate is None else rate.low,
        "samples_per_second_high": None if rate is None else rate.high,
        "rates": list(rates),
        "rounds": len(rates),
        "speed_up": None if gain is None else gain.value,
        "speed_up_low": None if gain is None else gain.low,
        "speed_up_high": None if gain is None else gain.high,
        "clear": clear,
        "unclear_because": because if clear is False else None,
    }


def too_short(samples: int, batch_size: int, *, batches: int) -> str | None:
    """Why so few samples show no steady rate at this size: loading ahead and scoring need several batches."""
    found = -(-samples // max(batch_size, 1))
    if found >= batches:
        return None
    return f"{plural(samples, 'sample')} are only {plural(found, 'batch', 'batches')} of {batch_size}"


def oom_risk(row: Mapping[str, Any]) -> str:
    """How likely a run at this size is to run out of memory, by the memory that its trials left free."""
    if row.get("failed"):
        return "does not fit"
    if row.get("oom_events"):
        return "ran out, survived"
    headroom = row.get("headroom_fraction")
    if headroom is None:
        return "unknown"
    return "low" if headroom >= 0.2 else "medium" if headroom >= 0.1 else "high"
