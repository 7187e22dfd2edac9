"""Sentences about figures, computed from them: what a chart shows, for those who cannot see it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["listed", "trend_words"]


def listed(names: Sequence[str], *, most: int = 6) -> str:
    """`a, b and c`; of many, the first few and how many more."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def trend_words(figures: Sequence[tuple[str, float | None]], show: Callable[[object], str]) -> str:
    """`from 0.490 at 2 to 0.962 at 13; highest 0.963 at 12`, of labelled figures in their order."""
    known = [(label, value) for label, value in figures if value is not None]
    if not known:
        return "not known"
    if len(known) == 1:
        return f"{show(known[0][1])} at {known[0][0]}"
    if len({show(value) for _, value in known}) == 1:
        return f"{show(known[0][1])} throughout"
    (first, start), (last, end) = known[0], known[-1]
    words = f"from {show(start)} at {first} to {show(end)} at {last}"
    top, highest = max(known, key=lambda one: one[1])
    bottom, lowest = min(known, key=lambda one: one[1])
    extremes = []
    if show(highest) not in (show(start), show(end)):
        extremes.append(f"highest {show(highest)} at {top}")
    if show(lowest) not in (show(start), show(end)):
        extremes.append(f"lowest {show(lowest)} at {bottom}")
    return "; ".join([words, *extremes])
