"""A line of a run's checklist: how figures of one or several runs become a verdict with its number and limit.

It knows neither which checks there are nor where figures come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from brim.errors import plural

__all__ = ["Asked", "CheckLine", "CheckVerdict", "JudgedFigure", "counts_text", "line_of", "not_judged", "percent"]

CheckVerdict = Literal["pass", "fail", "unknown"]
TITLES = {
    "failed": "failures",
    "out_of_memory": "out of memory",
    "alloc_retries": "allocator retries",
    "gpu_utilisation": "GPU utilisation",
    "waiting_for_data": "waiting for data",
    "throttling": "throttling",
    "peak_memory": "peak memory",
    "epoch_seconds": "epoch time",
    "total_seconds": "total time",
    "speed_up": "speed-up",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckLine:
    """One line of the checklist."""

    name: str
    verdict: CheckVerdict | None  # None: shown, and not judged because no limit was asked for
    value: Any  # the number, in seconds, bytes or as a fraction; None: not known
    limit: Any  # what it was held to; None: nothing
    text: str  # the number and the limit for people
    interval: tuple[float, float] | None = None  # of a speed-up

    @property
    def title(self) -> str:
        """What people call it."""
        return TITLES[self.name]

    def to_json(self) -> dict[str, Any]:
        """The line as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class JudgedFigure:
    """What one run, or one of the runs inside it, has to say on one line."""

    ok: bool | None  # None: could not be measured
    value: float | None = None
    text: str = ""  # the value
    why: str = ""  # it failed, or could not be measured
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Asked:
    """The limit of a line: as it is recorded and as it is written, and which figure is the worst."""

    limit: Any
    words: str
    worst: Callable[..., JudgedFigure] = max


def line_of(name: str, found: Sequence[JudgedFigure], asked: Asked, *, noun: str) -> CheckLine:
    """One line over all figures: the worst of them, and unknown where any of them is."""
    failed = [one for one in found if one.ok is False]
    unknown = [one for one in found if one.ok is None]
    several = len(found) > 1
    if failed:
        worst = _worst(failed, asked)
        where = f"; {len(failed)} of {plural(len(found), noun)}, {worst.label} the worst" if several else ""
        text = f"{worst.text}, {worst.why}{where}"
        return CheckLine(name=name, verdict="fail", value=worst.value, limit=asked.limit, text=text)
    if unknown or not found:
        why = unknown[0].why if unknown else f"no {noun} ran"
        where = f" ({len(unknown)} of {plural(len(found), noun)})" if several else ""
        value = unknown[0].value if unknown else None
        return CheckLine(name=name, verdict="unknown", value=value, limit=asked.limit, text=f"{why}{where}")
    worst = _worst(found, asked)
    where = f" at {worst.label}, the worst" if several else ""
    words = f" ({asked.words})" if asked.words else ""
    return CheckLine(
        name=name, verdict="pass", value=worst.value, limit=asked.limit, text=f"{worst.text}{where}{words}"
    )


def _worst(found: Iterable[JudgedFigure], asked: Asked) -> JudgedFigure:
    return asked.worst(found, key=lambda one: one.value if one.value is not None else 0.0)


def not_judged(line: CheckLine, *, more: str = "") -> CheckLine | None:
    """A figure that nobody set a limit to: shown where it is known."""
    if line.verdict != "pass":
        return None
    return dataclasses.replace(line, verdict=None, text=f"{line.text}{more}")


def counts_text(lines: Sequence[CheckLine], *, reasons: bool = True) -> str:
    """`5 passed, 1 failed (GPU utilisation 12.0 %, below 30 %), 2 could not be measured`."""
    failed = [line for line in lines if line.verdict == "fail"]
    unknown = sum(line.verdict == "unknown" for line in lines)
    parts = [f"{sum(line.verdict == 'pass' for line in lines)} passed"]
    if failed:
        why = "; ".join(f"{line.title} {line.text}" for line in failed)
        parts.append(f"{len(failed)} failed ({why})" if reasons else f"{len(failed)} failed")
    if unknown:
        parts.append(f"{unknown} could not be measured")
    return ", ".join(parts)


def percent(fraction: float) -> str:
    """A limit as people write it: `30 %`."""
    return f"{100 * fraction:g} %"
