"""The curves of several seeds in one chart, each faint and their mean bold; of any kind of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from brim.advice.run_reader import Run, entries
from brim.errors import plural
from brim.reporting.base import Column, PageTable, Section, present, words
from brim.reporting.charts import Axis, Chart, Marks, line_chart
from brim.reporting.kinds.training_files import figure_names, read_epochs
from brim.reporting.theme import Series, series_colour
from brim.units import count_text, number, significant, text

__all__ = ["MOST_CURVES", "runs_section", "seed_chart"]

MOST_CURVES = 60  # drawn each; of more the first ones, and the mean of all
Curve = Sequence[tuple[float, float]]  # epoch from 1, figure

_NOT_FIGURES = (
    "name", "seed", "learning_rate", "folder", "best_epoch", "epochs", "stopped_early", "fast_path", "error",
)  # fmt: skip


def seed_chart(groups: Mapping[str, Mapping[str, Curve]], *, title: str, figure: str) -> Chart | None:
    """One bold line for each group, the mean of its curves; the curves themselves faint behind it."""
    series = [Series(label=name, colour=series_colour(place), bare=True) for place, name in enumerate(groups)]
    rows: list[dict[str, Any]] = []
    faint: list[dict[str, Any]] = []
    for name, curves in groups.items():
        rows += [_at(x, y, name) for x, y in _means([*curves.values()])]
        drawn = len({row["run"] for row in faint})
        for seed, curve in list(curves.items())[: max(MOST_CURVES - drawn, 0)] if len(curves) > 1 else []:
            faint += [{**_at(x, y, name), "run": f"{name}: {seed}"} for x, y in curve]
    several = max((sum(bool(curve) for curve in curves.values()) for curves in groups.values()), default=0)
    note = f"Means of {plural(several, 'run')}; a faint line is a run." if faint else ""
    behind = Marks(mark="faint", rows=faint)
    return line_chart(title, rows, x=Axis("epoch", "whole"), y=Axis(figure), series=series, marked=[behind], note=note)


def _at(x: float, y: float, line: str) -> dict[str, Any]:
    return {"x": x, "y": y, "line": line, "label": f"epoch {count_text(x)}", "shown": significant(y)}


def _means(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """At every epoch the mean over the curves that have it."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            found.setdefault(x, []).append(y)
    return [(x, math.fsum(values) / len(values)) for x, values in sorted(found.items())]


def runs_section(run: Run) -> Section | None:
    """Every run of a training of several seeds: its curves, its figures, where it lies; None of a single run."""
    rows = entries(run.summary.get("runs"))
    if not rows:
        return None
    epochs = [(row, _epochs(run, row)) for row in rows]
    several = len({number(row.get("learning_rate")) for row in rows}) > 1
    which = "runs at the best learning rate" if several else "runs"
    figures = figure_names([line for _, own in epochs for line in own])
    charts = []
    for field, title in {"train_loss": "training loss", "val_loss": "validation loss", **figures}.items():
        groups: dict[str, dict[str, Curve]] = {}
        for row, own in epochs:
            group = f"learning rate {significant(row.get('learning_rate'))}" if several else title
            curve = [(line["epoch"], line[field]) for line in own if line.get(field) is not None]
            groups.setdefault(group, {})[text(row.get("name"))] = curve
        charts.append(seed_chart(groups, title=f"{title[0].upper()}{title[1:]} of each run", figure=title))
    return Section(
        title="Runs",
        paragraphs=(f"Each run is a seed, in a folder of its own. The curves above are means over the {which}.",),
        charts=present(*charts),
        table=_table(rows),
        open=len(rows) <= 12,
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> PageTable:
    figures = dict.fromkeys(name for row in rows for name in row if isinstance(name, str) and name not in _NOT_FIGURES)
    shown = [
        {**row, "best": None if (best := number(row.get("best_epoch"))) is None else best + 1,
         "stopped": "yes" if row.get("stopped_early") is True else None}
        for row in rows
    ]  # fmt: skip
    columns = (
        words("run", "name"),
        Column("learning rate", "learning_rate", significant),
        *(Column(name, name, significant) for name in figures),
        Column("best epoch", "best", count_text),
        Column("epochs", "epochs", count_text),
        words("stopped early", "stopped"),
        words("path", "fast_path"),
        words("error"),
    )
    return PageTable("Each run at its best epoch", columns, shown)


def _epochs(run: Run, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The epochs of one run, from its own folder; one that is not there has none."""
    name = row.get("folder")
    if not isinstance(name, str) or "/" in name or name.startswith("."):
        return []
    return read_epochs(run.folder / name)
