"""What a sweep would do, as plain text: how many experiments, which lists are paired and why, a table. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from brim.settings.experiment_ids import BATCH_KEY, MODEL_KEY, value_text
from brim.settings.grid import Expansion, Experiment
from brim.settings.problems import render_problems

__all__ = ["render_preview", "shared_settings", "varied_keys"]


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
        told = " · ".join(f"{key} {_shown(value)}" for key, value in shared.items())
        parts += ["", textwrap.fill(f"in all: {told}", width, subsequent_indent="  ")]
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
    told = "1 experiment" if count == 1 else f"{count:,} experiments"
    if expansion.total is None:
        told = f"the first {told}"
    elif expansion.total > count:
        told = f"the first {count:,} of {expansion.total:,} experiments"
    whole = count if expansion.total is None else expansion.total
    return f"{told} ({expansion.product:,} with every list crossed)" if expansion.product > whole else told


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
