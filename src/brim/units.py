"""How a figure is written: one format for each quantity, on every page, in charts and in tables alike.

A figure that is not known is an em dash, never a zero. Also how figures are put into a sentence. It knows neither
which figures there are nor where they stand.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Sequence

from brim.settings.sizes import format_bytes

__all__ = [
    "UNKNOWN", "ByteUnit", "byte_unit", "bytes_text", "count_text", "course", "date_text", "duration_text",
    "fraction_text", "interval_text", "listed", "number", "ratio_text", "score_text", "short_name", "signed_text",
    "significant", "spread_text", "text",
]  # fmt: skip

UNKNOWN = "—"


def number(value: object) -> float | None:
    """The value if it is a finite number, else None: a document may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def text(value: object) -> str:
    """Anything as it is written in a table; a yes or no as such."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value)
    return str(value)


def significant(value: object) -> str:
    """Three significant digits, thousands apart, no exponent until it must be: `1,234`, `43.1`, `0.0431`."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    if figure == 0:
        return "0"
    size = abs(figure)
    if size < 1e-4 or size >= 1e9:
        return f"{figure:.2e}"
    decimals = max(2 - math.floor(math.log10(size)), 0)
    return f"{figure:,.{decimals}f}"


def count_text(value: object) -> str:
    """A whole number: `12,345`."""
    figure = number(value)
    return UNKNOWN if figure is None else f"{figure:,.0f}"


def score_text(value: object) -> str:
    """A score or an accuracy: `0.741`."""
    figure = number(value)
    return UNKNOWN if figure is None else f"{figure:.3f}"


def interval_text(value: object, half_width: object) -> str:
    """A score with the half width of its 95 % interval: `0.741 ± 0.012`; without one the score alone."""
    if number(value) is None or number(half_width) is None:
        return score_text(value)
    return f"{score_text(value)} ± {score_text(half_width)}"


def spread_text(mean: object, deviation: object) -> str:
    """A figure over seeds: `0.820 ± 0.012`; of one seed the figure alone."""
    return significant(mean) if number(deviation) is None else f"{significant(mean)} ± {significant(deviation)}"


def signed_text(value: object, half_width: object = None) -> str:
    """A difference, with its sign: `+0.014 ± 0.006`."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    spread = "" if number(half_width) is None else f" ± {score_text(half_width)}"
    return f"{figure:+.3f}{spread}".replace("-", "−")


def fraction_text(value: object) -> str:
    """A fraction as a percentage: `13.5 %`."""
    figure = number(value)
    return UNKNOWN if figure is None else f"{100 * figure:.1f} %"


def ratio_text(value: object) -> str:
    """How many times as much: `1.31×`."""
    figure = number(value)
    return UNKNOWN if figure is None else f"{significant(figure)}×"


def bytes_text(value: object) -> str:
    """Bytes in the unit that suits them: `17.3 GiB`."""
    return format_bytes(number(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteUnit:
    """The one unit of a chart's axis."""

    name: str
    size: int

    def of(self, count: object) -> float | None:
        """Bytes in this unit."""
        figure = number(count)
        return None if figure is None else figure / self.size


def byte_unit(counts: Iterable[object]) -> ByteUnit:
    """GiB, or MiB where nothing reaches one GiB."""
    largest = max((figure for count in counts if (figure := number(count)) is not None), default=0)
    return ByteUnit(name="GiB", size=2**30) if largest >= 2**30 else ByteUnit(name="MiB", size=2**20)


def duration_text(seconds: object) -> str:
    """`3 h 12 min`, `4 min 5 s`, `12.4 s`."""
    figure = number(seconds)
    if figure is None:
        return UNKNOWN
    if figure < 60:
        return f"{significant(figure)} s"
    minutes, rest = divmod(round(figure), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def date_text(moment: object) -> str:
    """An ISO time in UTC: `15 November 2026, 14:18 UTC`; as it stands where it is none."""
    try:
        parsed = datetime.datetime.fromisoformat(str(moment))
    except ValueError:
        return text(moment)
    if parsed.tzinfo is None:
        return f"{parsed.day} {parsed:%B %Y, %H:%M}"
    parsed = parsed.astimezone(datetime.UTC)
    return f"{parsed.day} {parsed:%B %Y, %H:%M} UTC"


def short_name(name: object) -> str:
    """What people call a model or data: the last part of a path, the function of `py:FILE:FUNCTION`."""
    said = text(name)
    return said.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1] or said


def listed(names: Sequence[str], *, most: int = 6) -> str:
    """`a, b and c`; of many, the first few and how many more."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def course(figures: Sequence[tuple[str, float, str]]) -> str:
    """`from 0.490 at 2 to 0.962 at 13; highest 0.963 at 12`, of places, figures and how they are written."""
    if not figures:
        return "not known"
    (first, _, start), (last, _, end) = figures[0], figures[-1]
    if len(figures) == 1:
        return f"{start} at {first}"
    if len({shown for _, _, shown in figures}) == 1:
        return f"{start} throughout"
    words = [f"from {start} at {first} to {end} at {last}"]
    for name, pick in (("highest", max), ("lowest", min)):
        place, _, shown = pick(figures, key=lambda one: one[1])
        if shown not in (start, end):
            words.append(f"{name} {shown} at {place}")
    return "; ".join(words)
