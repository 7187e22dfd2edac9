"""The page of a profile: the recommendation first, then the figures behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping, value_at
from brim.errors import plural
from brim.monitor.trace_file import read_rows
from brim.profiling.pareto import ALL_ZERO
from brim.reporting.base import (
    Column,
    Fact,
    Page,
    PageTable,
    Section,
    facts,
    note_section,
    present,
    words,
)
from brim.reporting.charts import Axis, Chart, Marks, bar_chart, crosses, line_chart, rings
from brim.reporting.kinds.profile_view import KnobPoint, ProfileView, Trend, cost_of, make_points, recommended
from brim.reporting.machine import machine_section
from brim.reporting.repeat import repeat_sections
from brim.reporting.search import FITS, MISSED, PROBE_COLUMNS, probe_charts, probe_rows
from brim.reporting.theme import INK, LIMIT, LegendKey, Series, ramp_for, series_colour, series_for
from brim.units import (
    byte_unit,
    bytes_text,
    count_text,
    course,
    duration_text,
    interval_text,
    listed,
    number,
    ratio_text,
    score_text,
    short_name,
    significant,
    text,
)

__all__ = ["THROUGHPUT", "latency_rows", "profile_page"]

PARTS = ("vision", "prefill", "decode")
THROUGHPUT = Trend("Throughput (samples/s)", "samples_per_second", significant)
TOKENS = Trend("Vision tokens per sample (mean)", "vision_tokens_mean", significant)
_FEW_LINES = 3  # so many lines of a search are followed where they cross

_SIZES = {
    "batch_size_ceiling": Series(label="ceiling", colour=LIMIT, dash=(6, 4), bare=True),
    "batch_size_max": Series(label="largest safe", colour=series_colour(1), shape="square", dash=(6, 3)),
    "batch_size_used": Series(label="used", colour=series_colour(0)),
}
_MEMORY = {
    "peak_allocated_bytes": Series(label="allocated", colour=series_colour(1), shape="square", dash=(6, 3)),
    "peak_reserved_bytes": Series(label="reserved", colour=series_colour(0)),
}
SPEED_COLUMNS = (
    Column("samples/s", "samples_per_second", significant),
    Column("batch size used", "batch_size_used", count_text),
    Column("largest safe", "batch_size_max", count_text),
    Column("ceiling", "batch_size_ceiling", count_text),
    Column("OOM events", "oom_events", count_text),
    Column("planning (s)", "plan_seconds", significant),
    Column("duration (s)", "duration_seconds", significant),
)
MEMORY_COLUMNS = (
    Column("allocated (peak)", "peak_allocated_bytes", bytes_text),
    Column("reserved (peak)", "peak_reserved_bytes", bytes_text),
    Column("memory limit", "limit_bytes", bytes_text),
    Column("batch size used", "batch_size_used", count_text),
)
LATENCY_COLUMNS = (
    Column("batch size", "batch_size", count_text),
    *(Column(f"{name} (ms)", name, significant) for name in ("p50", "p95", "p99")),
    *(Column(f"{part} p50 (ms)", part, significant) for part in PARTS),
)


def profile_page(run: Run) -> Page:
    """Headline, figures, search, machine, settings."""
    assert run.profile is not None
    document = run.profile
    axis, points = make_points(document["knobs"], document["summary"])
    choice = recommended(document)
    metric = str(document.get("metric") or "accuracy")
    view = ProfileView(knobs=document["knobs"], metric=metric, axis=axis, points=points, chosen=choice.chosen)
    done = sum(point.done for point in points)
    return Page(
        title=f"Profile of {short_name(run.request.get('model'))}",
        subtitle=f"over {', '.join(document['knobs'])} on {text(run.request.get('data'))}; {plural(done, 'value')} in "
        f"{duration_text(document.get('duration_seconds'))}",
        headline=_headline(view),
        facts=_facts(view),
        remarks=tuple(line for line in choice.sentences if line != ALL_ZERO),
        warnings=(*(line for line in choice.sentences if line == ALL_ZERO), *_warnings(points)),
        sections=present(
            _accuracy_section(view),
            view.front_section(choice.cost, view.front_rows(choice.cost, [choice.front], choice)),
            _speed_section(view),
            _memory_section(view),
            _latency_section(view),
            _search_section(view),
            machine_section(_traces(run, points), limit_bytes=_common_limit(points), what=view.what),
            _all_figures(run, view),
            note_section(document.get("notes")),
            *repeat_sections(run),
        ),
    )


def _headline(view: ProfileView) -> str:
    if view.chosen is None:
        return "No value can be recommended"
    return f"Recommended: {view.points[view.chosen].label.replace('=', ' = ')}"


def _facts(view: ProfileView) -> tuple[Fact, ...]:
    """The figures of the point to take, against the most accurate one where that is another."""
    if view.chosen is None:
        return ()
    point = view.points[view.chosen]
    known = [one for one in view.points if one.figure("accuracy") is not None]
    best = max(known, key=lambda one: (one.figure("accuracy") or 0.0, one is point), default=point)
    rate, best_rate = point.figure("samples_per_second"), best.figure("samples_per_second")
    other = best is not point
    faster = f"{ratio_text(rate / best_rate)} the rate at {best.short}" if other and rate and best_rate else ""
    largest, limit = point.figure("batch_size_max"), point.figure("limit_bytes")
    return facts(
        Fact(
            view.metric,
            interval_text(point.figure("accuracy"), point.figure("accuracy_ci95")),
            f"best {score_text(best.figure('accuracy'))} at {best.short}" if other else "",
        ),
        Fact("throughput", f"{significant(rate)} samples/s", faster),
        Fact(
            "batch size",
            count_text(point.figure("batch_size_used")),
            f"largest safe {count_text(largest)}" if largest else "",
        ),
        Fact(
            "reserved memory",
            bytes_text(point.figure("peak_reserved_bytes")),
            f"of {bytes_text(limit)}" if limit else "",
        ),
        Fact("latency at batch 1", f"{significant(cost_of(point.entry, 'latency_ms'))} ms", "median"),
    )


def _warnings(points: Sequence[KnobPoint]) -> tuple[str, ...]:
    failed = [point for point in points if not point.done]
    samples = sum(int(point.figure("num_failed") or 0) for point in points)
    return present(
        *(f"{point.label}: {point.entry.get('error') or point.entry.get('state')}" for point in failed[:5]),
        f"and {plural(len(failed) - 5, 'value')} more were not measured" if len(failed) > 5 else None,
        f"{plural(samples, 'sample')} failed: counted as wrong; see the values' own samples.jsonl" if samples else None,
    )


def _traces(run: Run, points: Sequence[KnobPoint]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Every value's trace in the order they ran."""
    ordered = sorted(points, key=lambda point: str(point.entry.get("started_at") or ""))
    places = [(point.short, run.inside(point.entry.get("folder"))) for point in ordered]
    return [(short, read_rows(place / "monitor.csv")) for short, place in places if place is not None]


def _common_limit(points: Sequence[KnobPoint]) -> float | None:
    """The limit where all values had about the same: free memory strays from value to value."""
    limits = [limit for point in points if (limit := point.figure("limit_bytes")) is not None]
    return min(limits) if limits and max(limits) <= 1.05 * min(limits) else None


def _accuracy_section(view: ProfileView) -> Section:
    """Accuracy with its interval, and what the knob really did."""
    saturated = [point.short for point in view.points if point.entry.get("saturated")]
    spread = any(point.figure("accuracy_ci95") is not None for point in view.points)
    columns = (
        Column(view.metric, "accuracy", score_text),
        Column("± (95 %)", "accuracy_ci95", score_text),
        Column("standard deviation", "accuracy_std", score_text),
        Column("samples", "num_samples", count_text),
        Column("failed samples", "num_failed", count_text),
        Column("vision tokens", "vision_tokens_mean", significant),
        Column("crops used", "crops_used_mean", significant),
        words("saturated"),
    )
    return Section(
        title="Accuracy",
        paragraphs=present(
            "Bars are 95 % intervals." if spread else None,
            f"Hollow points are saturated: at {view.what} {listed(saturated)} no sample uses more than at the value "
            "below, so nothing can change."
            if saturated
            else None,
        ),
        charts=present(view.trend(view.accuracy), view.trend(TOKENS)),
        table=view.table("Accuracy", columns),
    )


def _speed_section(view: ProfileView) -> Section:
    """Samples per second, and the batch sizes behind them."""
    charts = present(view.trend(THROUGHPUT), _named_chart(view, "Batch size (samples)", _SIZES, "sizes"))
    return Section(title="Throughput and batch size", charts=charts, table=view.table("Speed", SPEED_COLUMNS))


def _named_chart(
    view: ProfileView, title: str, fields: Mapping[str, Series], scale: Any, *, size: float = 1.0,
    limit: float | None = None, show: Any = count_text,
) -> Chart | None:  # fmt: skip
    """Several figures of each point as lines of one chart; over several knobs the last of them alone."""
    main = list(fields)[-1]
    several = len(view.series()) > 1
    known = [field for field in fields if (field == main or not several) and any(p.figure(field) for p in view.points)]
    rows = [
        {
            **point.place(), "line": view.line(0, point) if several else fields[field].label,
            "y": figure / size if (figure := point.figure(field)) else None, "shown": show(figure),
            "chosen": field == main and point.index == view.chosen,
        }
        for field in known
        for point in view.points
    ]  # fmt: skip
    series = view.series() if several else [fields[field] for field in known]
    note = "" if limit is None else f"The memory limit is {show(limit * size)}."
    return view.chart(title, rows, Axis(title, scale), series=series, limit=limit, note=note)


def _memory_section(view: ProfileView) -> Section:
    """Peak allocated and reserved bytes under the limit."""
    limits = [point.figure("limit_bytes") for point in view.points]
    unit = byte_unit([*limits, *(point.figure(field) for point in view.points for field in _MEMORY)])
    fields = dict(_MEMORY)
    common = _common_limit(view.points)
    if common is None and any(limits) and len(view.series()) == 1:  # a limit that moves is a line of its own
        fields = {"limit_bytes": Series(label="memory limit", colour=LIMIT, dash=(6, 4), bare=True), **fields}
    chart = _named_chart(
        view, f"Memory ({unit.name})", fields, "zero", size=unit.size, limit=unit.of(common), show=bytes_text
    )
    if chart is None:
        return Section(title="Memory", paragraphs=("No memory was measured on this device.",))
    return Section(title="Memory", charts=(chart,), table=view.table("Memory", MEMORY_COLUMNS))


def latency_rows(points: Sequence[KnobPoint], batch: str) -> list[dict[str, Any]]:
    """The median of each part and the percentiles of the whole; a point without a latency has no row.

    `batch` is `batch_1` or `batch_used`.
    """
    rows = []
    for point in points:
        figures = mapping(value_at(point.entry, f"latency_ms.{batch}"))
        total = {name: number(value_at(figures, f"total.{name}")) for name in ("p50", "p95", "p99")}
        parts = {part: number(value_at(figures, f"{part}.p50")) for part in PARTS}
        if total["p50"] is not None or any(value is not None for value in parts.values()):
            rows.append({**point.place(), **total, **parts, "batch_size": number(figures.get("batch_size"))})
    return rows


def _latency_section(view: ProfileView) -> Section:
    """Where a batch's time goes, for one sample alone and at the size used."""
    rows = {batch: latency_rows(view.points, batch) for batch in ("batch_1", "batch_used")}
    charts = present(
        _latency_chart(view, "At batch size 1 (ms)", rows["batch_1"]),
        _latency_chart(view, "At the batch size used (ms)", rows["batch_used"]),
    )
    if not charts:
        return Section(title="Latency", paragraphs=("No latency was measured.",))
    said = (
        "Medians of the parts of a batch's time, stacked; the mark above is the 95th percentile of the whole. A "
        "batch's time is not divided by its samples, and medians of parts need not add up to the median of the whole."
    )
    table = view.table("Latency, the whole and its parts,", LATENCY_COLUMNS, [*rows["batch_1"], *rows["batch_used"]])
    return Section(title="Latency", paragraphs=(said,), charts=charts, table=table)


def _latency_chart(view: ProfileView, title: str, rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    known = [part for part in PARTS if any(row[part] is not None for row in rows)]
    parts = {part: part for part in known} or {"whole": "p50"}
    stacked = [
        {
            **row,
            "x": row["short"],
            "line": part,
            "place": place,
            "y": row[field],
            "shown": f"{significant(row[field])} ms",
        }
        for row in rows
        for place, (part, field) in enumerate(parts.items())
        if row[field] is not None
    ]
    ticks = [
        {**row, "x": row["short"], "y": row["p95"], "shown": f"{significant(row['p95'])} ms"}
        for row in rows
        if row["p95"] is not None
    ]
    whole = [(row["short"], row["p50"], f"{significant(row['p50'])} ms") for row in rows if row["p50"] is not None]
    absent = [p.short for p in view.points if p.done and p.short not in {row["short"] for row in rows}]
    few = f" Not measured, or in too few batches for a median, at {listed(absent)}." if absent else ""
    highest = "p95 of the whole"
    marked = Marks(
        mark="tick", rows=ticks, colour=INK, hover={"label": view.what, "shown": highest},
        key=LegendKey(highest, INK, "line"),
    )  # fmt: skip
    return bar_chart(
        title, stacked, x=Axis(view.what), figure="median", series=series_for(list(parts)), marked=[marked],
        caption=f"{title}, stacked by part; the whole: {course(whole)}.{few}",
    )  # fmt: skip


def _search_section(view: ProfileView) -> Section:
    """Every size tried at every value, its memory and its speed."""
    rows: list[dict[str, Any]] = []
    for point in view.points:
        place = {**point.place(), "line": point.short}
        probes = entries(point.entry.get("probes"))
        rows += probe_rows(probes, place=place, limit_bytes=point.figure("limit_bytes"))
    if not rows:
        return Section(title="Batch-size search", paragraphs=("No size was searched for: there are no probes.",))
    chosen = "" if view.chosen is None else view.points[view.chosen].short
    lines = ramp_for(list(dict.fromkeys(row["line"] for row in rows)))
    few = len(lines) <= _FEW_LINES
    limit = _common_limit(view.points)
    charts = probe_charts(
        rows, limit_bytes=limit, note="" if limit is None else f"The memory limit is {bytes_text(limit)}.",
        series=[dataclasses.replace(one, joined=few or one.label == chosen, named=True) for one in lines],
        titles=("Reserved memory by batch size", "Throughput by batch size"),
    )  # fmt: skip
    crossed = (
        "Crosses are sizes that did not fit; in the chart of memory they are at what they needed, or at the limit."
    )
    return Section(
        title="Batch-size search",
        paragraphs=present(
            None if all(row["fits"] for row in rows) else crossed,
            f"A line joins the sizes of the recommended value, {chosen}." if chosen and not few else None,
        ),
        charts=present(_tried_chart(view, rows), *charts),
        table=view.table("Every size tried,", PROBE_COLUMNS, rows),
    )


def _tried_chart(view: ProfileView, rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Every size at its value: a dot where it fitted, a cross where not, a ring at the one used."""
    axis = view.axis
    if any(point.line for point in view.points):  # several knobs: each point has a place of its own
        axis = Axis(view.what, "words", tuple(point.short for point in view.points))

    def at(row: Mapping[str, Any], size: float, line: str) -> dict[str, Any]:
        x = row["short"] if axis is not view.axis else row["x"]
        return {**row, "x": x, "y": size, "line": line, "shown": count_text(size), "label": row["short"]}

    tried = [{**at(row, row["batch_size"], "fits"), "reason": f"{row['verdict']}: {count_text(row['batch_size'])}"}
             for row in rows]  # fmt: skip
    sizes = {
        field: [at(point.place(), size, "ceiling") for point in view.points if (size := point.figure(field))]
        for field in ("batch_size_used", "batch_size_ceiling")
    }
    fitting = [row for row in tried if row["fits"]]
    missed = [row for row in tried if not row["fits"]]
    return line_chart(
        "Sizes tried (samples)", [*fitting, *sizes["batch_size_ceiling"]], x=axis, y=Axis("batch size", "sizes"),
        series=[dataclasses.replace(one, joined=False) for one in (FITS, _SIZES["batch_size_ceiling"])],
        marked=[*crosses(missed, MISSED), rings(sizes["batch_size_used"], LegendKey("used", INK, "ring"))],
        caption=_tried_words(rows),
    )  # fmt: skip


def _tried_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many probes at how many values, and at which values which size did not fit."""
    said = f"{plural(len(rows), 'probe')} at {plural(len({row['short'] for row in rows}), 'value')}"
    missed: dict[tuple[float, str], list[str]] = {}
    for row in rows:
        if not row["fits"]:
            missed.setdefault((row["batch_size"], row["verdict"]), []).append(row["short"])
    if not missed:
        return f"{said}; every size tried fitted."
    named = [f"{count_text(size)} at {listed(at, most=4)} ({verdict})" for (size, verdict), at in missed.items()]
    return f"{said}. Did not fit: {'; '.join(named[:4])}{'; …' if len(named) > 4 else ''}."


def _all_figures(run: Run, view: ProfileView) -> Section:
    rows = [
        {**point.entry, **point.place(), "report": run.report_of(point.entry.get("folder")),
         "latency": cost_of(point.entry, "latency_ms"),
         "accuracy_shown": interval_text(point.figure("accuracy"), point.figure("accuracy_ci95"))}
        for point in view.points
    ]  # fmt: skip
    columns = (
        words(view.what, "short", link="report"),
        words("state"),
        Column(view.metric, "accuracy_shown"),
        Column("samples/s", "samples_per_second", significant),
        Column("batch size", "batch_size_used", count_text),
        Column("reserved", "peak_reserved_bytes", bytes_text),
        Column("latency (ms)", "latency", significant),
        Column("samples", "num_samples", count_text),
        Column("OOM events", "oom_events", count_text),
        Column("duration", "duration_seconds", duration_text),
        words("error"),
    )
    said = ("A linked value leads to its own report.",) if any(row["report"] for row in rows) else ()
    table = PageTable(f"One row for each {view.what}", columns, rows)
    return Section(title="All values", paragraphs=said, table=table)
