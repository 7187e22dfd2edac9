"""The batch-size search of a profile: every size tried at every value, what it took, and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Key, Panel, Section, Table
from brim.reporting.charts.probes import draw_probes, draw_sizes
from brim.reporting.charts.theme import INK, LIMIT, MUTED, Line, ramp_for
from brim.reporting.kinds.profile_figures import Profile
from brim.reporting.rows.points import KnobAxis, Point
from brim.reporting.rows.probes import probe_rows, probes_of
from brim.reporting.sections.search import FITS_KEYS, LIMIT_KEY, PROBE_COLUMNS, shown_probes
from brim.reporting.units import byte_unit, bytes_text, count_text, significant
from brim.reporting.wording import listed

__all__ = ["common_limit", "search_section"]

_MOST_KEYS = 14  # entries of a legend that are still read


def search_section(profile: Profile) -> Section:
    """Every size tried at every value."""
    rows: list[dict[str, Any]] = []
    for point in profile.points:
        place = {**point.place(), "line": point.short}
        rows += probe_rows(probes_of(point.entry), place=place, limit_bytes=point.figure("limit_bytes"))
    rows = shown_probes(rows)
    if not rows:
        return Section(title="Batch-size search", paragraphs=("No size was searched for: there are no probes.",))
    crossed = (
        "Crosses are sizes that did not fit; in the chart of memory they are at what they needed, or at the limit."
    )
    said = () if all(row["fits"] for row in rows) else (crossed,)
    return Section(
        title="Batch-size search",
        paragraphs=said,
        panels=(_sizes_panel(profile, rows), *_probe_panels(profile, rows)),
        table=Table(
            caption=f"Every size tried, by {profile.what}",
            columns=(Column(title=profile.what, field="short", words=True), *PROBE_COLUMNS),
            rows=rows,
        ).known(),
    )


def common_limit(points: Sequence[Point]) -> float | None:
    """The limit where all values had about the same: free memory strays from value to value."""
    limits = [limit for point in points if (limit := point.figure("limit_bytes")) is not None]
    if not limits or max(limits) > 1.05 * min(limits):
        return None
    return min(limits)


def _sizes_panel(profile: Profile, rows: Sequence[Mapping[str, Any]]) -> Panel:
    used: list[dict[str, Any]] = []
    ceilings: list[dict[str, Any]] = []
    for point in profile.points:
        for field, kept in (("batch_size_used", used), ("batch_size_ceiling", ceilings)):
            size = point.figure(field)
            if size:
                kept.append({**point.place(), "batch_size": size, "size_shown": count_text(size)})
    keys = [*_fit_keys(rows), Key(label="used", colour=INK, mark="ring")]
    keys += [Key(label="ceiling", colour=LIMIT, mark="dashed")] if ceilings else []
    axis = profile.axis
    if any(point.line for point in profile.points):  # several knobs: each point has a place of its own
        axis = KnobAxis(title=profile.what, scale="words", values=tuple(point.short for point in profile.points))
        rows, used, ceilings = ([{**row, "x": row["short"]} for row in some] for some in (rows, used, ceilings))
    return Panel(
        title="Sizes tried (samples)",
        spec=draw_sizes(rows, used, ceilings, axis=axis),
        alternative=_tried_words(rows),
        keys=tuple(keys),
    )


def _probe_panels(profile: Profile, rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    lines = ramp_for(list(dict.fromkeys(row["line"] for row in rows)))
    keys = [line.key() for line in lines]
    if len(lines) > _MOST_KEYS:  # nobody reads so many: the two ends of the ramp say which way it goes
        keys = [keys[0], Key(label="to", colour=MUTED, mark="none"), keys[-1]]
    panels = (_memory_panel(profile, rows, lines, keys), _rate_panel(profile, rows, lines, keys))
    return [panel for panel in panels if panel is not None]


def _memory_panel(
    profile: Profile, rows: Sequence[Mapping[str, Any]], lines: Sequence[Line], keys: Sequence[Key]
) -> Panel | None:
    fitting = [row for row in rows if row["fits"] and row["drawn_bytes"] is not None]
    if not fitting:
        return None
    limit = common_limit(profile.points)
    unit = byte_unit([*(row["drawn_bytes"] for row in rows), limit])
    least, most = (pick(fitting, key=lambda row: row["drawn_bytes"]) for pick in (min, max))
    words = f"Where it fitted, reserved memory lies between {_memory_at(least)} and {_memory_at(most)}"
    words += f"; the limit is {bytes_text(limit)}." if limit else "."
    return Panel(
        title=f"Reserved memory by batch size ({unit.name})",
        spec=draw_probes(
            [{**row, "y": unit.of(row["drawn_bytes"])} for row in rows],
            lines=lines,
            limits=[limit / unit.size] if limit else [],
        ),
        alternative=words,
        keys=(*keys, *_fit_keys(rows)[1:], *((LIMIT_KEY,) if limit else ())),
    )


def _rate_panel(
    profile: Profile, rows: Sequence[Mapping[str, Any]], lines: Sequence[Line], keys: Sequence[Key]
) -> Panel | None:
    timed = [row for row in rows if row["rate"] is not None]
    if not timed:
        return None
    best = [max((row for row in timed if row["line"] == line), key=lambda row: row["rate"])
            for line in dict.fromkeys(row["line"] for row in timed)]  # fmt: skip
    fastest, slowest = (pick(best, key=lambda row: row["rate"]) for pick in (max, min))
    words = f"The best rate of a probe lies between {_rate_at(slowest)} and {_rate_at(fastest)}, by {profile.what}."
    return Panel(
        title="Throughput by batch size (samples/s)",
        spec=draw_probes([{**row, "y": row["rate"]} for row in timed], lines=lines),
        alternative=words if len(best) > 1 else f"The best rate of a probe is {_rate_at(fastest)}.",
        keys=tuple(keys),
    )


def _memory_at(row: Mapping[str, Any]) -> str:
    return f"{bytes_text(row['drawn_bytes'])} (size {count_text(row['batch_size'])} at {row['short']})"


def _rate_at(row: Mapping[str, Any]) -> str:
    return f"{significant(row['rate'])} samples/s (size {count_text(row['batch_size'])} at {row['short']})"


def _tried_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many probes at how many values, and at which values which size did not fit."""
    values = list(dict.fromkeys(row["short"] for row in rows))
    said = f"{plural(len(rows), 'probe')} at {plural(len(values), 'value')}"
    missed: dict[tuple[float, str], list[str]] = {}
    for row in rows:
        if not row["fits"]:
            missed.setdefault((row["batch_size"], row["verdict"]), []).append(row["short"])
    if not missed:
        return f"{said}; every size tried fitted."
    named = [f"{count_text(size)} at {listed(at, most=4)} ({verdict})" for (size, verdict), at in missed.items()]
    return f"{said}. Did not fit: {'; '.join(named[:4])}{'; …' if len(named) > 4 else ''}."


def _fit_keys(rows: Sequence[Mapping[str, Any]]) -> tuple[Key, ...]:
    return FITS_KEYS if any(not row["fits"] for row in rows) else FITS_KEYS[:1]
