"""The figures of a profile: accuracy, speed, memory and latency over the knob, and accuracy against cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Key, Panel, Section, Table
from brim.reporting.charts.bars import draw_stacks
from brim.reporting.charts.front import draw_front
from brim.reporting.charts.theme import ACCENT, BAD, INK, LIMIT, MUTED, Line, lines_for, series_colour
from brim.reporting.charts.trend import draw_trend
from brim.reporting.rows.points import SEPARATOR, KnobAxis, Point
from brim.reporting.rows.profile import (
    COSTS,
    PARTS,
    Cost,
    Recommended,
    accuracy_row,
    front_rows,
    latency_rows,
    memory_rows,
)
from brim.reporting.units import byte_unit, bytes_text, count_text, score_text, significant
from brim.reporting.wording import listed, trend_words

__all__ = ["Profile", "accuracy_section", "front_section", "latency_section", "memory_section", "speed_section"]

_ONLY = "all values"  # the one line of a profile over one knob
CHOSEN_KEY = Key(label="recommended", colour=ACCENT, mark="ring")
FAILED_KEY = Key(label="failed", colour=BAD, mark="cross")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What every section looks at."""

    document: Mapping[str, Any]
    axis: KnobAxis
    points: Sequence[Point]
    choice: Recommended

    @property
    def metric(self) -> str:
        return str(self.document.get("metric") or "accuracy")

    @property
    def what(self) -> str:
        """What the short name of a point stands for: the knob, or the knobs."""
        return SEPARATOR.join(self.document["knobs"])

    def lines(self) -> list[Line]:
        """One for each setting of the other knobs."""
        return lines_for(list(dict.fromkeys(point.line or _ONLY for point in self.points)))

    def row(self, point: Point) -> dict[str, Any]:
        """What every row of a trend has."""
        return {**point.place(), "line": point.line or _ONLY, "chosen": point.index == self.choice.chosen}

    def failed(self) -> list[dict[str, Any]]:
        """The values that were not measured, and why."""
        return [
            {**point.place(), "reason": str(point.entry.get("error") or point.entry.get("state"))}
            for point in self.points
            if not point.done
        ]

    def keys(self, lines: Sequence[Line]) -> tuple[Key, ...]:
        """The legend of a trend: lines where there are several, the ring, and the cross where something failed."""
        many = tuple(line.key() for line in lines) if len(lines) > 1 else ()
        ring = (CHOSEN_KEY,) if self.choice.chosen is not None else ()
        return (*many, *ring, *((FAILED_KEY,) if self.failed() else ()))

    def words(self, field: str, show: Callable[[object], str]) -> str:
        """How a figure goes over the points."""
        return trend_words([(point.short, point.figure(field)) for point in self.points], show)

    def table(self, caption: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
        """Rows by point."""
        named = Column(title=self.what, field="short", words=True)
        return Table(caption=caption, columns=(named, *columns), rows=rows).known()


def _trend_panel(
    profile: Profile,
    title: str,
    rows: Sequence[dict[str, Any]],
    words: str,
    lines: Sequence[Line] | None = None,
    **more: Any,
) -> Panel | None:
    """A trend; None where nothing of it is known."""
    if all(row["y"] is None for row in rows):
        return None
    lines = profile.lines() if lines is None else lines
    spec = draw_trend(rows, axis=profile.axis, lines=lines, title=title, failed=profile.failed(), **more)
    return Panel(title=title, spec=spec, alternative=f"{title} over {profile.what}: {words}.", keys=profile.keys(lines))


def accuracy_section(profile: Profile) -> Section:
    """Accuracy with its interval, and what the knob really came to."""
    rows = [{**accuracy_row(point), **profile.row(point)} for point in profile.points]
    saturated = [point.short for point in profile.points if point.entry.get("saturated")]
    said = ["Bars are 95 % intervals."] if any(row["low"] is not None for row in rows) else []
    if saturated:
        said.append(
            f"Hollow points are saturated: at {profile.what} {listed(saturated)} no sample uses more than at the value "
            f"below, so nothing can change."
        )
    tokens = [
        {
            **profile.row(point),
            "y": point.figure("vision_tokens_mean"),
            "shown": significant(point.figure("vision_tokens_mean")),
        }
        for point in profile.points
    ]
    panels = (
        _trend_panel(
            profile, f"Accuracy ({profile.metric})", rows, profile.words("accuracy", score_text), from_zero=False
        ),
        _trend_panel(
            profile, "Vision tokens per sample (mean)", tokens, profile.words("vision_tokens_mean", significant)
        ),
    )
    columns = (
        Column(title=profile.metric, field="accuracy", show=score_text),
        Column(title="± (95 %)", field="accuracy_ci95", show=score_text),
        Column(title="standard deviation", field="accuracy_std", show=score_text),
        Column(title="samples", field="num_samples", show=count_text),
        Column(title="failed samples", field="num_failed", show=count_text),
        Column(title="vision tokens", field="vision_tokens_mean", show=significant),
        Column(title="crops used", field="crops_used_mean", show=significant),
        Column(title="saturated", field="saturated", words=True),
    )
    table = profile.table(f"Accuracy by {profile.what}", columns, [{**p.entry, **p.place()} for p in profile.points])
    return _section("Accuracy", said, panels, table)


def speed_section(profile: Profile) -> Section:
    """Samples per second, and the batch sizes behind them."""
    rows = [
        {**profile.row(p), "y": p.figure("samples_per_second"), "shown": significant(p.figure("samples_per_second"))}
        for p in profile.points
    ]
    panels = (
        _trend_panel(profile, "Throughput (samples/s)", rows, profile.words("samples_per_second", significant)),
        _sizes_panel(profile),
    )
    columns = (
        Column(title="samples/s", field="samples_per_second", show=significant),
        Column(title="batch size used", field="batch_size_used", show=count_text),
        Column(title="largest safe", field="batch_size_max", show=count_text),
        Column(title="ceiling", field="batch_size_ceiling", show=count_text),
        Column(title="OOM events", field="oom_events", show=count_text),
        Column(title="planning (s)", field="plan_seconds", show=significant),
        Column(title="duration (s)", field="duration_seconds", show=significant),
    )
    table = profile.table(f"Speed by {profile.what}", columns, [{**p.entry, **p.place()} for p in profile.points])
    return _section("Throughput and batch size", [], panels, table)


def _sizes_panel(profile: Profile) -> Panel | None:
    """The size used, the largest safe one and the ceiling; over several knobs, the size used alone."""
    styles = {
        "batch_size_ceiling": Line(label="ceiling", colour=LIMIT, dash=(6, 4), bare=True),
        "batch_size_max": Line(label="largest safe", colour=series_colour(1), shape="square", dash=(6, 3)),
        "batch_size_used": Line(label="used", colour=series_colour(0)),
    }
    if len(profile.lines()) > 1:
        rows = [_sized(profile, point, "batch_size_used", point.line) for point in profile.points]
        lines = profile.lines()
    else:
        shown = {field: line for field, line in styles.items() if any(p.figure(field) for p in profile.points)}
        rows = [_sized(profile, point, field, line.label) for field, line in shown.items() for point in profile.points]
        lines = list(shown.values())
    used, largest = (profile.words(field, count_text) for field in ("batch_size_used", "batch_size_max"))
    words = f"used {used}; largest safe {largest}"
    return _trend_panel(profile, "Batch size (samples)", rows, words, lines=lines, sizes=True)


def _sized(profile: Profile, point: Point, field: str, line: str) -> dict[str, Any]:
    size = point.figure(field)
    chosen = field == "batch_size_used" and point.index == profile.choice.chosen
    return {**profile.row(point), "line": line, "y": size or None, "shown": count_text(size), "chosen": chosen}


def memory_section(profile: Profile) -> Section:
    """Peak allocated and reserved bytes under the limit."""
    fields = {"limit": "limit_bytes", "allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
    unit = byte_unit(point.figure(field) for point in profile.points for field in fields.values())
    rows = memory_rows(profile.points, unit)
    several = len(profile.lines()) > 1
    known = [name for name in fields if any(row[name] is not None for row in rows)]
    shown = [name for name in known if name != "allocated" or not several]
    styles = _memory_lines(shown)
    lines = (
        [*(styles[name] for name in shown if name == "limit"), *profile.lines()] if several else list(styles.values())
    )
    drawn = [
        {
            **profile.row(point), "line": point.line if several and name == "reserved" else styles[name].label,
            "y": row[name], "shown": bytes_text(point.figure(fields[name])),
            "chosen": name == "reserved" and point.index == profile.choice.chosen,
        }
        for name in shown
        for point, row in zip(profile.points, rows, strict=True)
    ]  # fmt: skip
    words = (
        f"reserved {profile.words('peak_reserved_bytes', bytes_text)}; limit {profile.words('limit_bytes', bytes_text)}"
    )
    columns = (
        Column(title="allocated (peak)", field="peak_allocated_bytes", show=bytes_text),
        Column(title="reserved (peak)", field="peak_reserved_bytes", show=bytes_text),
        Column(title="memory limit", field="limit_bytes", show=bytes_text),
        Column(title="batch size used", field="batch_size_used", show=count_text),
    )
    panel = _trend_panel(profile, f"Memory ({unit.name})", drawn, words, lines=lines) if drawn else None
    if panel is None:
        return Section(title="Memory", paragraphs=("No memory was measured on this device.",))
    table = profile.table(f"Memory by {profile.what}", columns, [{**p.entry, **p.place()} for p in profile.points])
    return _section("Memory", [], (panel,), table)


def _memory_lines(shown: Sequence[str]) -> dict[str, Line]:
    styles = {
        "allocated": Line(label="allocated", colour=series_colour(1), shape="square", dash=(6, 3)),
        "reserved": Line(label="reserved", colour=series_colour(0)),
        "limit": Line(label="memory limit", colour=LIMIT, dash=(6, 4), bare=True),
    }
    return {name: styles[name] for name in shown}


def front_section(profile: Profile) -> Section:
    """Accuracy against cost, and the point to take."""
    cost = COSTS.get(profile.choice.cost, Cost(title=profile.choice.cost.replace("_", " "), unit=""))
    rows = [{**row, "cost_shown": cost.text(row["cost"])} for row in front_rows(profile.points, profile.choice)]
    if not rows:
        return Section(title="Accuracy against cost", paragraphs=("No value has both an accuracy and a cost.",))
    x_title = f"{cost.title} ({cost.unit})" if cost.unit else cost.title
    front = [row["short"] for row in rows if row["front"]]
    chosen = next((row for row in rows if row["chosen"]), None)
    words = f"{plural(len(rows), 'point')}; on the front: {listed(front, most=14) or 'none'}."
    if chosen is not None:
        words += f" Recommended: {chosen['label']}, {profile.metric} {chosen['shown']} at {chosen['cost_shown']}."
    keys = (
        Key(label="on the front", colour=series_colour(0)),
        Key(label="beaten by another", colour=MUTED, filled=False),
        Key(label="recommended", colour=ACCENT, mark="diamond"),
    )
    panel = Panel(
        title=f"{profile.metric} against {cost.title}",
        spec=draw_front(rows, x_title=x_title, y_title=profile.metric, what=profile.what),
        alternative=f"{profile.metric} over {x_title}. {words}",
        keys=keys if chosen is not None else keys[:2],
    )
    columns = (
        Column(title=x_title, field="cost", show=significant),
        Column(title=profile.metric, field="shown"),
        Column(title="on the front", field="front", words=True),
        Column(title="role", field="roles", words=True),
    )
    said = (
        "A point is on the front where no other is as accurate and cheaper, or as cheap and more accurate; of points "
        "with the same accuracy it is the one with the smallest values."
    )
    return _section(
        "Accuracy against cost",
        [said],
        (panel,),
        profile.table("Points by cost", columns, sorted(rows, key=lambda row: row["cost"])),
    )


def latency_section(profile: Profile) -> Section:
    """Where a batch's time goes, for one sample alone and at the size used."""
    panels, tabled = [], []
    for batch, title in (("batch_1", "At batch size 1 (ms)"), ("batch_used", "At the batch size used (ms)")):
        rows = latency_rows(profile.points, batch)
        if rows:
            panels.append(_stack_panel(profile, title, rows))
            tabled += [{**row, "batch": row["batch_size"]} for row in rows]
    if not panels:
        return Section(title="Latency", paragraphs=("No latency was measured.",))
    columns = (
        Column(title="batch size", field="batch", show=count_text),
        *(Column(title=f"{name} (ms)", field=name, show=significant) for name in ("p50", "p95", "p99")),
        *(Column(title=f"{part} p50 (ms)", field=part, show=significant) for part in PARTS),
    )
    said = (
        "Medians of the parts of a batch's time, stacked; the mark above is the 95th percentile of the whole. A "
        "batch's time is not divided by its samples, and medians of parts need not add up to the median of the whole."
    )
    return _section("Latency", [said], panels, profile.table("Latency: the whole and its parts", columns, tabled))


def _stack_panel(profile: Profile, title: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    known = [part for part in PARTS if any(row[part] is not None for row in rows)]
    parts = {part: part for part in known} or {"whole": "p50"}
    stacked = [
        {**row, "part": part, "place": place, "y": row[field], "shown": f"{significant(row[field])} ms"}
        for row in rows
        for place, (part, field) in enumerate(parts.items())
        if row[field] is not None
    ]
    ticks = [
        {**row, "y": row["p95"], "shown": f"{significant(row['p95'])} ms"} for row in rows if row["p95"] is not None
    ]
    lines = lines_for(list(parts))
    keys = [Key(label=line.label, colour=line.colour, mark="bar") for line in lines]
    keys += [Key(label="p95 of the whole", colour=INK, mark="line")] if ticks else []
    words = [
        f"{part} {trend_words([(row['short'], row[field]) for row in rows], significant)}"
        for part, field in parts.items()
    ]
    there = {row["short"] for row in rows}
    absent = [point.short for point in profile.points if point.done and point.short not in there]
    few = f" Not measured, or in too few batches for a median, at {listed(absent)}." if absent else ""
    return Panel(
        title=title,
        spec=draw_stacks(stacked, ticks, lines=lines, x_title=profile.what, tick_title="p95 of the whole"),
        alternative=f"{title}, stacked: {'; '.join(words)}.{few}",
        keys=tuple(keys),
    )


def _section(title: str, said: Sequence[str], panels: Sequence[Panel | None], table: Table) -> Section:
    drawn = tuple(panel for panel in panels if panel is not None)
    return Section(title=title, paragraphs=tuple(said), panels=drawn, table=table, table_open=not drawn)
