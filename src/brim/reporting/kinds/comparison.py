"""The page of a comparison: the rate of each size or the gain of each optimisation, with intervals and what to take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries, mapping
from brim.advice.run_requests import command_of
from brim.reporting.base import Column, Fact, Page, PageTable, Section, facts, note_section, present, words
from brim.reporting.charts import Axis, Chart, category_chart, crosses, limit_line, line_chart, rings
from brim.reporting.repeat import repeat_sections
from brim.reporting.theme import Series, series_colour
from brim.units import bytes_text, count_text, duration_text, number, short_name, significant, text

__all__ = ["comparison_page"]

Row = Mapping[str, Any]
_NO_CHANGE = 1.0  # a speed-up of 1 is none
_HOW_SIZES = (
    "The sizes took turns, round by round; bars are 95 % intervals of the rate. A speed-up is over the first size that "
    "ran, and clear if its interval lies on one side of 1."
)
_HOW_LEARNT = "Loss and AUROC are those after equally many samples, not of whole trainings."
_HOW_SWITCHES = (
    "Each was switched off alone, and all took turns, round by round; bars are 95 % intervals. A gain is clear if its "
    "interval lies on one side of 1 and the samples are enough for a steady rate."
)


def comparison_page(run: Run) -> Page:
    """Recommendation, chart, table; of batch sizes or of optimisations switched off."""
    rows = entries(run.summary.get("rows"))
    advice = mapping(run.summary.get("recommendation"))
    switches = any("brings" in row for row in rows)
    shown = [_shown(row, "brings" if switches else "speed_up") for row in rows]
    stopped = run.summary.get("interrupted") is True
    what = "What makes it fast" if switches else "Batch sizes compared"
    return Page(
        title=f"{what}: {short_name(run.request.get('model') or 'molecule heads')}" if not _is_training(run) else what,
        subtitle=f"brim {run.request.get('command') or run.kind}, took {run.duration}",
        headline=_sentence(text(advice.get("text"))),
        facts=_facts(rows, switches=switches),
        warnings=("It was stopped before the end; these are the measurements until then.",) if stopped else (),
        sections=present(
            *(_switch_sections(shown) if switches else _size_sections(shown, advice)),
            note_section(run.summary.get("notes")),
            *repeat_sections(run, command=_command(run)),
        ),
    )


def _command(run: Run) -> str:
    """The command without its flag, which is a field of the request; a training is asked for by its file."""
    command = str(run.request.get("command") or run.kind).partition(" ")[0]
    if command != "train" or run.request.get("argv"):
        return command_of({**run.request, "command": command}, kind=command)
    asked = {"command": command, "compare_batch": run.request.get("compare_batch")}
    head, _, flags = command_of(asked, kind=command).partition(" --")
    return f"{head} {shlex.quote(str(run.request.get('file') or 'config.yaml'))} --{flags}"


def _is_training(run: Run) -> bool:
    return str(run.request.get("command")).startswith("train ")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _facts(rows: Sequence[Row], *, switches: bool) -> tuple[Fact, ...]:
    measured = [row for row in rows if number(row.get("samples_per_second")) is not None]
    if not measured:
        return ()
    best = max(measured, key=lambda row: row["samples_per_second"])
    rounds = [count for row in measured if (count := number(row.get("rounds"))) is not None]
    named = "everything on" if switches else f"batch {count_text(best.get('batch_size'))}"
    shown = rows[0] if switches else best
    return facts(
        Fact("fastest" if not switches else "throughput", f"{significant(shown.get('samples_per_second'))}/s", named),
        Fact("rounds", count_text(max(rounds, default=None)), "each row is measured once in each"),
        Fact("failed", count_text(failed)) if (failed := sum(bool(row.get("failed")) for row in rows)) else None,
    )


def _shown(row: Row, field: str) -> dict[str, Any]:
    """A row with the words of its gain and of its interval."""
    gain, low, high = (number(row.get(name)) for name in (field, f"{field}_low", f"{field}_high"))
    bounds = f"{low:.2f} to {high:.2f}" if low is not None and high is not None else ""
    clear = row.get("clear")
    why = row.get("unclear_because") or (f"{bounds} includes 1" if bounds else "measured once")
    return {
        **row,
        "gain": None if gain is None else f"{gain:.2f}×",
        "bounds": bounds if clear is not None else None,
        "verdict": row.get("failed") or (f"not clear: {why}" if clear is False else "clear" if clear else None),
    }


def _size_sections(rows: Sequence[Row], advice: Row) -> tuple[Section, ...]:
    learnt = [row for row in rows if row.get("final_loss") is not None or row.get("auroc") is not None]
    columns = (
        Column("batch size", "batch_size", count_text),
        Column("samples/s", "samples_per_second", significant),
        Column("speed-up", "gain"),
        Column("95 % interval", "bounds"),
        words("verdict"),
        Column("rounds", "rounds", count_text),
        Column("micro-batch", "micro_batch_size", count_text),
        Column("accumulation", "accumulation_steps", count_text),
        Column("epoch", "epoch_seconds", duration_text),
        Column("in total", "total_seconds", duration_text),
        Column("loss", "final_loss", significant),
        Column("AUROC", "auroc", significant),
    )
    rate = Section(
        title="Rate over batch size",
        paragraphs=(_HOW_SIZES, *((_HOW_LEARNT,) if learnt else ())),
        charts=present(_rate_chart(rows, advice)),
        table=PageTable("Sizes", columns, rows),
        open=True,
    )  # fmt: skip
    memory = PageTable(
        "Memory",
        (
            Column("batch size", "batch_size", count_text),
            Column("forecast", "forecast_peak_bytes", bytes_text),
            Column("peak reserved", "peak_reserved_bytes", bytes_text),
            Column("limit", "limit_bytes", bytes_text),
            Column("free", "headroom_fraction", _percent),
            Column("GPU use", "gpu_utilisation_mean", _percent),
            words("OOM risk", "risk"),
        ),
        rows,
    )
    known = any(number(row.get("peak_reserved_bytes")) for row in rows)
    if not known:
        return (rate,)
    return (rate, Section(title="Memory", charts=present(_memory_chart(rows)), table=memory, open=True))


def _percent(value: object) -> str:
    fraction = number(value)
    return text(None) if fraction is None else f"{fraction:.0%}"


def _rate_chart(rows: Sequence[Row], advice: Row) -> Chart | None:
    points = [
        {
            "x": row.get("batch_size"), "y": number(row.get("samples_per_second")), "line": "samples/s",
            "label": f"batch {count_text(row.get('batch_size'))}",
            "shown": significant(row.get("samples_per_second")), "low": number(row.get("samples_per_second_low")),
            "high": number(row.get("samples_per_second_high")), "reason": text(row.get("failed")),
        }
        for row in sorted(rows, key=lambda row: number(row.get("batch_size")) or 0)
    ]  # fmt: skip
    chosen = [one for one in points if one["x"] == advice.get("batch_size") and one["y"] is not None]
    lost = [{**one, "y": None} for one in points if one["y"] is None and one["reason"]]
    return line_chart(
        "Samples per second by batch size", points, x=Axis("batch size", "sizes"), y=Axis("samples/s", "zero"),
        marked=[rings(chosen), *crosses(lost)], note="Bars are 95 % intervals.",
    )  # fmt: skip


def _memory_chart(rows: Sequence[Row]) -> Chart | None:
    ordered = sorted(rows, key=lambda row: number(row.get("batch_size")) or 0)
    series = [Series(label="measured", colour=series_colour(0)), Series(label="forecast", colour=series_colour(1))]
    points = [
        {
            "x": row.get("batch_size"), "y": None if (held := number(row.get(field))) is None else held / 2**30,
            "line": line, "label": f"batch {count_text(row.get('batch_size'))}", "shown": bytes_text(row.get(field)),
        }
        for line, field in (("measured", "peak_reserved_bytes"), ("forecast", "forecast_peak_bytes"))
        for row in ordered
    ]  # fmt: skip
    peak = max((one["y"] for one in points if isinstance(one["y"], float)), default=0.0)
    limit = next((found / 2**30 for row in rows if (found := number(row.get("limit_bytes")))), None)
    near = limit if limit is not None and limit <= 4 * peak else None  # far away it would flatten the lines
    return line_chart(
        "Peak memory by batch size, in GiB", points, x=Axis("batch size", "sizes"), y=Axis("GiB", "zero"),
        series=series if any(row.get("forecast_peak_bytes") for row in rows) else series[:1],
        marked=[limit_line(near)],
    )  # fmt: skip


def _switch_sections(rows: Sequence[Row]) -> tuple[Section, ...]:
    columns = (
        words("switched off", "name"),
        words("instead", "setting"),
        Column("samples/s", "samples_per_second", significant),
        Column("it brings", "gain"),
        Column("95 % interval", "bounds"),
        words("verdict"),
        Column("rounds", "rounds", count_text),
        words("note"),
    )
    gains = [
        {
            "x": row["brings"], "low": number(row.get("brings_low")), "high": number(row.get("brings_high")),
            "name": text(row.get("name")), "line": "it brings",
            "shown": f"{text(row['gain'])} ({row['bounds'] or 'measured once'})",
        }
        for row in rows if number(row.get("brings")) is not None
    ]  # fmt: skip
    chart = category_chart(
        "What each optimisation brings", gains, x=Axis("times as fast as without it"), what="optimisation",
        rule=_NO_CHANGE,
    )  # fmt: skip
    return (
        Section(
            title="What each optimisation brings",
            paragraphs=(_HOW_SWITCHES,),
            charts=present(chart),
            table=PageTable("Optimisations switched off", columns, rows),
            open=True,
        ),
    )
