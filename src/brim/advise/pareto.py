"""Which point of a profile to take: the Pareto front of accuracy against cost, and the cheapest point that will do.

Pure: it is given points, and gives some of them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Candidate", "Recommendation", "cheapest_meeting", "cheapest_within", "pareto_front"]


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


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The points that no other beats: as accurate and cheaper, or as cheap and more accurate. Cheapest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.cost, -one.accuracy)):
        if not front or candidate.accuracy > front[-1].accuracy:
            front.append(candidate)
    return front


def cheapest_within(candidates: Sequence[Candidate], fraction: float = 0.01) -> Recommendation | None:
    """The cheapest point whose accuracy is within this fraction of the best; None without points."""
    if not candidates:
        return None
    best = max(candidates, key=lambda one: (one.accuracy, -one.cost))
    enough = (1 - fraction) * best.accuracy
    chosen = min((one for one in candidates if one.accuracy >= enough), key=lambda one: (one.cost, -one.accuracy))
    if chosen is best:
        return Recommendation(
            candidate=chosen, reason=f"the most accurate; nothing cheaper comes within {fraction:.0%}"
        )
    saved = 1 - chosen.cost / best.cost if best.cost > 0 else 0.0
    return Recommendation(
        candidate=chosen,
        reason=f"within {fraction:.0%} of the best accuracy ({best.accuracy:.4f}) at {saved:.0%} less cost",
    )


def cheapest_meeting(
    candidates: Sequence[Candidate], *, latency_ms: float | None = None, memory_bytes: int | None = None
) -> Recommendation | None:
    """The most accurate point that keeps to the bounds, the cheapest of equals; None if none does.

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
    chosen = min(fitting, key=lambda one: (-one.accuracy, one.cost))
    bounds = [f"at most {latency_ms:g} ms"] if latency_ms is not None else []
    bounds += [f"at most {memory_bytes:,} bytes"] if memory_bytes is not None else []
    return Recommendation(candidate=chosen, reason=f"the most accurate with {' and '.join(bounds)}")
