"""What a sweep would do, as plain text: its experiments, which lists are paired and why, forecast memory. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from brim.records import settings_in_words
from brim.settings.grid import Expansion, Experiment
from brim.settings.nested_keys import value_text
from brim.settings.problems import render_problems
from brim.settings.sizes import format_bytes
from brim.settings.train_settings import BATCH_KEY, MODEL_KEY
from brim.sizing.micro_batches import micro_batch_length
from brim.sweeps.forecasts import SizeForecast

__all__ = ["render_forecasts", "render_preview", "render_sweep", "shared_settings", "varied_keys"]


def render_preview(expansion: Expansion, *, width: int = 80, most_rows: int = 40) -> str:
    """The preview; a long table is cut in the middle, a long value at its end."""
    experiments = expansion.experiments
    parts = [_headline(expansion)]
    present = {experiment.group for experiment in experiments}
    for choice in expansion.pairings:
        if choice.group not in present:
            continue
        name = f"pairing of {choice.group}: " if choice.group is not None else "pairing: "
        parts.append(textwrap.fill(f"{name}{choice.mode}. {choice.reason}", width, subsequent_indent="  "))
    absent = [choice.group for choice in expansion.pairings if choice.group not in present and choice.group]
    if absent:
        parts.append(textwrap.fill(f"no experiment here of {', '.join(absent)}", width, subsequent_indent="  "))
    keys = varied_keys(experiments)
    parts += ["", *_table(experiments, keys, width=width, most_rows=most_rows)]
    shared = shared_settings(experiments, keys)
    if shared:
        settings = " · ".join(f"{key} {_shown(value)}" for key, value in shared.items())
        parts += ["", textwrap.fill(f"in all: {settings}", width, subsequent_indent="  ")]
    warnings = [problem for problem in expansion.problems if problem.severity == "warning"]
    notes = len(expansion.problems) - len(warnings)
    if warnings:
        parts += ["", render_problems(warnings)]
    if notes:
        parts += ["", "1 note on the file" if notes == 1 else f"{notes} notes on the file"]
    return "\n".join(parts)


def varied_keys(experiments: Sequence[Experiment]) -> list[str]:
    """The keys worth a column: model and batch size, then those that differ between experiments."""
    seen: dict[str, set[str]] = {}
    for experiment in experiments:
        for key, value in experiment.varied.items():
            seen.setdefault(key, set()).add(value_text(value))
    missing = {key for key in seen if any(key not in experiment.varied for experiment in experiments)}
    first = [key for key in (MODEL_KEY, BATCH_KEY) if key in seen]
    return [*first, *(key for key, values in seen.items() if key not in first and (len(values) > 1 or key in missing))]


def shared_settings(experiments: Sequence[Experiment], columns: Sequence[str]) -> dict[str, Any]:
    """The settings of the first experiment that no column shows: all others have them too."""
    if not experiments:
        return {}
    return {key: value for key, value in experiments[0].flat.items() if key not in columns}


def _headline(expansion: Expansion) -> str:
    count = len(expansion.experiments)
    headline = "1 experiment" if count == 1 else f"{count:,} experiments"
    if expansion.total is None:
        headline = f"the first {headline}"
    elif expansion.total > count:
        headline = f"the first {count:,} of {expansion.total:,} experiments"
    whole = count if expansion.total is None else expansion.total
    return f"{headline} ({expansion.product:,} with every list crossed)" if expansion.product > whole else headline


def _table(experiments: Sequence[Experiment], keys: Sequence[str], *, width: int, most_rows: int) -> list[str]:
    shown = list(enumerate(experiments, start=1))
    left_out = len(shown) - most_rows
    if left_out > 0:
        shown = [*shown[: most_rows - 1], shown[-1]]
    rows = [["#", *keys, "id"]]
    for number, experiment in shown:
        flat = {**experiment.flat, **experiment.varied}
        rows.append([str(number), *(_cell(flat, key) for key in keys), experiment.id])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1  # the widest gives way
    lines = ["  ".join(_fit(cell, room) for cell, room in zip(row, widths, strict=True)).rstrip() for row in rows]
    if left_out > 0:
        lines.insert(len(lines) - 1, f"… {left_out:,} more …")
    return lines


def _cell(flat: Mapping[str, Any], key: str) -> str:
    return _shown(flat[key]) if key in flat else "—"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else value_text(value)


def _fit(text: str, room: int) -> str:
    return text.ljust(room) if len(text) <= room else f"{text[: room - 1]}…"


MOST_ROWS = 40
_REASON = 60  # characters of why there is no forecast


def render_sweep(expansion: Expansion, forecasts: Mapping[str, SizeForecast], *, width: int = 80) -> str:
    """The whole preview."""
    parts = [render_preview(expansion, width=width)]
    memory = render_forecasts(expansion.experiments, forecasts, width=width)
    notes = [problem.message for problem in expansion.problems if problem.key == "data" and problem.severity == "note"]
    text = "\n\n".join(part for part in (*parts, memory, *notes) if part)
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def render_forecasts(
    experiments: Sequence[Experiment], forecasts: Mapping[str, SizeForecast], *, width: int = 80
) -> str:
    """A row for each distinct pair of model and batch size; empty where nothing was forecast."""
    rows: dict[tuple[str, ...], None] = {}
    reasons: dict[str, None] = {}
    made_for: dict[str, dict[str, None]] = {}  # models by what they were forecast for
    place = ""
    for experiment in experiments:
        forecast = forecasts.get(experiment.id)
        if forecast is None:
            continue
        if forecast.device:
            place = f" on {forecast.device}, of which {format_bytes(forecast.limit_bytes)} may be used"
        rows[_row(experiment, forecast)] = None
        if words := settings_in_words(forecast.made_for):
            made_for.setdefault(words, {})[str(experiment.flat.get(MODEL_KEY))] = None
        if forecast.reason is not None:
            reasons[f"{experiment.flat.get(MODEL_KEY)}: no forecast: {forecast.reason}"] = None
    if not rows:
        return ""
    header = ("model", "batch size", "runs at", "nvidia-smi", "largest", "")
    table = [header, *list(rows)[:MOST_ROWS]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    spare = width - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], spare), 8)
    lines = [textwrap.fill(f"forecast memory{place}", width, subsequent_indent="  ")]
    for row in table:
        first = row[0] if len(row[0]) <= widths[0] else f"{row[0][: widths[0] - 1]}…"
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(room) for cell, room in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    if len(rows) > MOST_ROWS:
        lines.append(f"… {len(rows) - MOST_ROWS:,} more …")
    for words, models in list(made_for.items())[:5]:
        lines.append(textwrap.fill(f"made for {words}: {', '.join(models)}", width, subsequent_indent="  "))
    lines += [textwrap.shorten(reason, width, placeholder=" …") for reason in list(reasons)[:5]]
    return "\n".join(lines)


def _wrapped(line: str, width: int) -> str:
    """A line of prose that is too long (a warning), over several."""
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False)


def _row(experiment: Experiment, forecast: SizeForecast) -> tuple[str, ...]:
    flat = experiment.flat
    model, asked = str(flat.get(MODEL_KEY)), str(flat.get(BATCH_KEY, "auto"))
    if forecast.batch_size is None:
        return model, asked, "—", "—", "—", ""
    memory = format_bytes(forecast.device_bytes)
    largest = f"{forecast.batch_size_max:,}" if forecast.batch_size_max else "none"
    runs_at = forecast.batch_size
    if not forecast.fits:  # in parts of about the same size
        most = forecast.batch_size_max
        runs_at = micro_batch_length(forecast.effective_batch or forecast.batch_size, most) if most else 0
    verdict = "" if forecast.fits else "does not fit"
    return model, asked, f"{runs_at:,}", memory, largest, verdict
