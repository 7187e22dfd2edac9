"""What a sweep would do, for people: its experiments, how they pair, the memory they are forecast to take. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from brim.records import settings_in_words
from brim.settings.experiment_ids import BATCH_KEY, MODEL_KEY
from brim.settings.grid import Expansion, Experiment
from brim.settings.grid_preview import render_preview
from brim.settings.sizes import format_bytes
from brim.sizing.micro_batches import micro_batch_length
from brim.sweeps.forecasts import SizeForecast

__all__ = ["render_forecasts", "render_sweep"]

MOST_ROWS = 40
_REASON = 60  # characters of why there is no forecast


def render_sweep(expansion: Expansion, forecasts: Mapping[str, SizeForecast], *, width: int = 80) -> str:
    """The whole preview."""
    parts = [render_preview(expansion, width=width)]
    memory = render_forecasts(expansion.experiments, forecasts, width=width)
    told = [problem.message for problem in expansion.problems if problem.key == "data" and problem.severity == "note"]
    text = "\n\n".join(part for part in (*parts, memory, *told) if part)
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
