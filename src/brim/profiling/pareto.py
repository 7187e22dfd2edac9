"""Which point of a profile to take: the Pareto front of accuracy against cost, and the cheapest point that will do.

Of points with the same accuracy the one with the smaller knob values represents all: what they cost is a time measured
once, and two measurements of the same work differ.

Pure: it is given points, and gives some of them back. `recommend` does it all for the entries of a profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.settings.sizes import format_bytes

__all__ = [
    "ALL_ZERO",
    "Candidate",
    "Recommendation",
    "cheapest_meeting",
    "cheapest_within",
    "pareto_front",
    "recommend",
    "without_ties",
]

ALL_ZERO = (
    "Every point scored 0, so the scores do not tell the points apart: read some answers in a point's samples.jsonl, "
    "and check the metric and the prompt, before choosing by them."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of a profile: its knob values, how good it is, what it costs, and what else may be bounded."""

    values: Mapping[str, Any]
    accuracy: float
    cost: float  # seconds a sample, say: less is better
    latency_ms: float | None = None
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The point to take, and why in one line."""

    candidate: Candidate
    reason: str


def without_ties(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The points without those that another one equals in accuracy with smaller knob values; words have no order."""
    return [
        one
        for one in candidates
        if not any(other.accuracy == one.accuracy and _smaller(other.values, one.values) for other in candidates)
    ]


def _smaller(values: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether no value is larger, and one is smaller."""
    differing = [(value, others[knob]) for knob, value in values.items() if value != others[knob]]
    return bool(differing) and all(_number(one) and _number(other) and one < other for one, other in differing)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The points that no other beats: as accurate and cheaper, or as cheap and more accurate. Cheapest first."""
    front: list[Candidate] = []
    for candidate in sorted(without_ties(candidates), key=lambda one: (one.cost, -one.accuracy)):
        if not front or candidate.accuracy > front[-1].accuracy:
            front.append(candidate)
    return front


def cheapest_within(candidates: Sequence[Candidate], fraction: float = 0.01) -> Recommendation | None:
    """The cheapest point whose accuracy is within this fraction of the best; None without points."""
    if not candidates:
        return None
    distinct = without_ties(candidates)
    best = max(distinct, key=lambda one: (one.accuracy, -one.cost))
    enough = (1 - fraction) * best.accuracy
    chosen = min((one for one in distinct if one.accuracy >= enough), key=lambda one: (one.cost, -one.accuracy))
    if chosen is best:
        return Recommendation(candidate=chosen, reason=_why_the_best(best, candidates, fraction))
    saved = 1 - chosen.cost / best.cost if best.cost > 0 else 0.0
    return Recommendation(
        candidate=chosen,
        reason=f"within {fraction:.0%} of the best accuracy ({best.accuracy:.4f}) at {saved:.0%} less cost",
    )


def _why_the_best(best: Candidate, candidates: Sequence[Candidate], fraction: float) -> str:
    tied = [one for one in candidates if one.accuracy == best.accuracy and _smaller(best.values, one.values)]
    if not tied:
        return f"the most accurate; nothing cheaper comes within {fraction:.0%}"
    if all(one.accuracy == best.accuracy for one in candidates):
        return f"every point has the same accuracy ({best.accuracy:.4f}), so the smallest is taken"
    return f"the most accurate ({best.accuracy:.4f}), and the smallest of the {len(tied) + 1} points that are"


def cheapest_meeting(
    candidates: Sequence[Candidate],
    *,
    latency_ms: float | None = None,
    memory_bytes: int | None = None,
    fraction: float = 0.0,
) -> Recommendation | None:
    """The cheapest point that keeps to the bounds and is within this fraction of the best that does; None if none does.

    A point whose figure is not known does not keep to a bound on it.
    """
    fitting = [
        one
        for one in candidates
        if (latency_ms is None or (one.latency_ms is not None and one.latency_ms <= latency_ms))
        and (memory_bytes is None or (one.memory_bytes is not None and one.memory_bytes <= memory_bytes))
    ]
    if not fitting:
        return None
    fitting = without_ties(fitting)
    enough = (1 - fraction) * max(one.accuracy for one in fitting)
    chosen = min((one for one in fitting if one.accuracy >= enough), key=lambda one: (one.cost, -one.accuracy))
    bounds = [f"at most {latency_ms:g} ms"] if latency_ms is not None else []
    bounds += [f"at most {format_bytes(memory_bytes)}"] if memory_bytes is not None else []
    near = f"within {fraction:.0%} of the most accurate" if fraction else "the most accurate"
    return Recommendation(candidate=chosen, reason=f"{near} with {' and '.join(bounds)}")


def recommend(
    entries: Sequence[Mapping[str, Any]],
    knobs: Sequence[str],
    *,
    within: float = 0.01,
    target_latency_ms: float | None = None,
    target_memory_bytes: int | None = None,
) -> dict[str, Any]:
    """What to take of a profile's entries, as places in their list, with a sentence for each choice.

    Cost is seconds a sample. Latency is that of one sample alone: its 95th percentile, or the median where there were
    too few samples for one. Entries without accuracy or rate are not considered.
    """
    candidates = {place: one for place, entry in enumerate(entries) if (one := _candidate(entry, knobs)) is not None}
    places = {id(one): place for place, one in candidates.items()}
    points = list(candidates.values())

    def place(found: Recommendation | None) -> int | None:
        return None if found is None else places[id(found.candidate)]

    best = max(without_ties(points), key=lambda one: (one.accuracy, -one.cost), default=None)
    chosen = cheapest_within(points, within)
    text = [_sentence(chosen)] if chosen is not None else []
    all_zero = bool(points) and not any(one.accuracy for one in points)
    if all_zero:
        text.insert(0, ALL_ZERO)
    fast = small = None
    if target_latency_ms is not None:
        fast = cheapest_meeting(points, latency_ms=target_latency_ms, fraction=within)
        text.append(_sentence(fast) if fast else f"No point answers a single sample in {target_latency_ms:g} ms.")
    if target_memory_bytes is not None:
        small = cheapest_meeting(points, memory_bytes=target_memory_bytes, fraction=within)
        text.append(
            _sentence(small) if small else f"No point is known to stay below {format_bytes(target_memory_bytes)}."
        )
    return {
        "cost": "seconds_per_sample",
        "within": within,
        "all_zero": all_zero,
        "best": None if best is None else places[id(best)],
        "front": [places[id(one)] for one in pareto_front(points)],
        "cheapest_within": place(chosen),
        "target_latency_ms": target_latency_ms,
        "cheapest_meeting_latency": place(fast),
        "target_memory_bytes": target_memory_bytes,
        "cheapest_meeting_memory": place(small),
        "text": text,
    }


def _candidate(entry: Mapping[str, Any], knobs: Sequence[str]) -> Candidate | None:
    accuracy, rate = entry.get("accuracy"), entry.get("samples_per_second")
    if accuracy is None or not rate:
        return None
    alone = ((entry.get("latency_ms") or {}).get("batch_1") or {}).get("total") or {}
    return Candidate(
        values={knob: entry[knob] for knob in knobs},
        accuracy=accuracy,
        cost=1 / rate,
        latency_ms=alone.get("p95") if alone.get("p95") is not None else alone.get("p50"),
        memory_bytes=entry.get("peak_reserved_bytes"),
    )


def _sentence(found: Recommendation) -> str:
    named = ", ".join(f"{name}={value}" for name, value in found.candidate.values.items())
    return f"{named}: {found.reason}."
