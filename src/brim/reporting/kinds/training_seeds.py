"""The curves of several seeds in one chart, each faint and their mean bold; of any kind of training."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.errors import plural
from brim.reporting.base import Column, Panel, Section, Table
from brim.reporting.charts.curves import curve_key, draw_curves
from brim.reporting.charts.theme import Line, series_colour
from brim.reporting.read import Run
from brim.reporting.rows.training import epoch_rows, figure_names
from brim.reporting.units import count_text, number, significant, text
from brim.reporting.wording import trend_words

__all__ = ["MOST_CURVES", "runs_section", "seed_panel"]

MOST_CURVES = 60  # drawn each; of more the first ones, and the mean of all
Curve = Sequence[tuple[float, float]]  # epoch from 1, figure


def seed_panel(
    groups: Mapping[str, Mapping[str, Curve]], *, title: str, figure: str, show: Callable[[object], str] = significant
) -> Panel | None:
    """One bold line for each group, the mean of its curves; the curves themselves faint behind it."""
    known = {name: {seed: curve for seed, curve in curves.items() if len(curve)} for name, curves in groups.items()}
    known = {name: curves for name, curves in known.items() if curves}
    if not known:
        return None
    lines, rows, fine, words, drawn = [], [], [], [], 0
    for place, (name, curves) in enumerate(known.items()):
        means = _means(list(curves.values()))
        lines.append(Line(label=name, colour=series_colour(place), bare=True))
        rows += [_at(x, y, name, show) for x, y in means]
        words.append(f"{name} {trend_words([(f'epoch {count_text(x)}', y) for x, y in means], show)}")
        if len(curves) < 2:
            continue
        for seed, curve in list(curves.items())[: max(MOST_CURVES - drawn, 0)]:
            label = f"{name}: {seed}"
            lines.append(Line(label=label, colour=series_colour(place), bare=True))
            fine += [_at(x, y, label, show) for x, y in curve]
            drawn += 1
    several = max(len(curves) for curves in known.values())
    faint = " A faint line is a run." if fine else ""
    return Panel(
        title=title,
        spec=draw_curves(rows, lines=lines, x_title="epoch", title=figure, fine=fine, whole=True),
        alternative=f"Mean of {plural(several, 'run')} by epoch: {'; '.join(words)}.{faint}",
        keys=tuple(curve_key(line, points=False) for line in lines if line.label in known) if len(known) > 1 else (),
    )


def _at(x: float, y: float, line: str, show: Callable[[object], str]) -> dict[str, Any]:
    return {"x": x, "y": y, "line": line, "label": count_text(x), "shown": show(y)}


def _means(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """At every epoch the mean over the curves that have it."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            found.setdefault(x, []).append(y)
    return [(x, math.fsum(values) / len(values)) for x, values in sorted(found.items())]


def runs_section(run: Run) -> Section | None:
    """Every run of a training of several seeds: its curves, its figures, where it lies; None of a single run."""
    given = run.summary.get("runs")
    rows = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
    if not rows:
        return None
    epochs = {text(row.get("name")): (row, _epochs(run, row)) for row in rows}
    several = len({number(row.get("learning_rate")) for row in rows}) > 1
    which = "runs at the best learning rate" if several else "runs"
    panels = []
    figures = figure_names([line for _, own in epochs.values() for line in own])
    for field, title in {"train_loss": "training loss", "val_loss": "validation loss", **figures}.items():
        groups: dict[str, dict[str, Curve]] = {}
        for name, (row, own) in epochs.items():
            group = f"learning rate {significant(row.get('learning_rate'))}" if several else title
            curve = [(line["epoch"], line[field]) for line in own if line.get(field) is not None]
            groups.setdefault(group, {})[name] = curve
        panel = seed_panel(groups, title=f"{title[0].upper()}{title[1:]} of each run", figure=title)
        if panel is not None:
            panels.append(panel)
    return Section(
        title="Runs",
        paragraphs=(f"Each run is a seed, in a folder of its own. The curves above are means over the {which}.",),
        panels=tuple(panels),
        table=_table(rows),
        table_open=len(rows) <= 12,
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    known = ("name", "seed", "learning_rate", "folder", "best_epoch", "epochs", "stopped_early", "fast_path", "error")
    figures = dict.fromkeys(name for row in rows for name in row if isinstance(name, str) and name not in known)
    shown = [
        {**row, "best": None if (best := number(row.get("best_epoch"))) is None else best + 1,
         "stopped": "yes" if row.get("stopped_early") is True else None}
        for row in rows
    ]  # fmt: skip
    columns = (
        Column(title="run", field="name", words=True),
        Column(title="learning rate", field="learning_rate", show=significant),
        *(Column(title=name, field=name, show=significant) for name in figures),
        Column(title="best epoch", field="best", show=count_text),
        Column(title="epochs", field="epochs", show=count_text),
        Column(title="stopped early", field="stopped", words=True),
        Column(title="path", field="fast_path", words=True),
        Column(title="error", field="error", words=True),
    )
    return Table(caption="Each run at its best epoch", columns=columns, rows=shown).known()


def _epochs(run: Run, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The epochs of one run, from its own folder; one that is not there has none."""
    name = row.get("folder")
    if not isinstance(name, str) or "/" in name or name.startswith("."):
        return []
    try:
        with (run.folder / name / "epochs.csv").open(encoding="utf-8", errors="replace", newline="") as file:
            return epoch_rows(csv.DictReader(file))
    except (OSError, csv.Error):
        return []
