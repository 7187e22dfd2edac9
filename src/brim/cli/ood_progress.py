"""The progress bar of `brim ood`, and its table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from brim.cli.live_bars import LiveBars
from brim.errors import plural
from brim.molecules.heads import OodListener
from brim.molecules.run import OodResult
from brim.molecules.table import ResultCell
from brim.settings.sizes import format_bytes

__all__ = ["OodProgress", "print_result"]

_TITLES = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR95"}


class OodProgress(LiveBars, OodListener):
    """The bar: cells of the table, and what is being encoded or trained just now. Notes come as lines."""

    def __init__(self, console: Console, *, lines: bool = True) -> None:
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            lines=lines,
        )
        self._cells: TaskID | None = None
        self._now: TaskID | None = None
        self._text = ""  # of the bar that is there now

    def planned(self, total: int, done: int) -> None:
        """Set the bar up."""
        self._cells = self._progress.add_task("cells", total=total, completed=done)
        if done:
            self._print_line(
                f"resumed: {done:,} of {plural(total, 'cell')} {'was' if done == 1 else 'were'} done already"
            )

    def opened(self, *, data: str, encoder: str, counts: dict[str, int], width: int) -> None:
        """Print the sizes of the parts."""
        sizes = ", ".join(
            f"{stage} {counts[f'{part}_in']:,} + {counts[f'{part}_out']:,}"
            for stage, part in (("train", "train"), ("validation", "val"), ("test", "test"))
        )
        self._print_line(f"{data} · {encoder}: {width} features")
        self._print_line(f"in + out: {sizes}")

    def encoding(self, *, data: str, encoder: str, done: int, total: int) -> None:
        """Advance the bar of the encoder."""
        self._show(f"{encoder} on {data}", done, total)

    def training(self, *, data: str, encoder: str, method: str, runs: int) -> None:
        """A new bar for the epochs."""
        self._show(f"{method} on {data} · {encoder}: {plural(runs, 'run')}", 0, None)

    def epoch(self, *, runs: int, epoch: int, epochs: int, stopped: int) -> None:
        """Advance the bar of the epochs."""
        del runs
        if self._now is not None:
            self._progress.update(self._now, completed=epoch, total=epochs, stopped=stopped)

    def cells(self, cells: list[ResultCell]) -> None:
        """Advance the bar of the cells."""
        if self._cells is not None:
            self._progress.advance(self._cells, len(cells))
        for cell in cells:
            if cell.error is not None:
                self._print_line(f"failed: {cell.data} · {cell.method}: {cell.error}")

    def note(self, line: str) -> None:
        """One line above the bar."""
        self._print_line(f"note: {line}")

    def _show(self, text: str, done: int, total: int | None) -> None:
        if self._now is not None and self._text == text:
            self._progress.update(self._now, completed=done, total=total)
            return
        if self._now is not None:
            self._progress.remove_task(self._now)
        self._text = text
        self._now = self._progress.add_task(text, total=total, completed=done)


def print_result(console: Console, result: OodResult) -> None:
    """The table, how the heads were trained, and where the rest is."""
    summary = result.summary
    console.print(_table(summary["table"]))
    named = len({(row["data"], row["encoder"]) for row in summary["table"]}) > 1
    for training in summary["trainings"]:
        console.print(_training_line(training, named=named), markup=False, highlight=False)
    left_out = sum(len(found) for found in summary["molecules_left_out"].values())
    if left_out:
        console.print(f"{left_out:,} molecules left out: see molecules_left_out in run.json", highlight=False)
    for error in summary["errors"]:
        console.print(f"failed: {error}", markup=False, highlight=False)
    console.print(f"in {result.folder}", markup=False, highlight=False)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    several = len({row["encoder"] for row in rows}) > 1
    table.add_column("method", no_wrap=True)
    table.add_column("data", overflow="ellipsis", no_wrap=True)
    if several:
        table.add_column("encoder", overflow="ellipsis", no_wrap=True)
    for title in _TITLES.values():
        table.add_column(title, justify="right", no_wrap=True)
    best = _best(rows)
    for row in rows:
        names = [row["method"], row["data"], *([row["encoder"]] if several else [])]
        style = "bold" if row["method"] in best.get((row["data"], row["encoder"]), ()) else None
        table.add_row(*names, *(_figure(row[name]) for name in _TITLES), style=style)
    return table


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """The methods with the highest mean AUROC on each data set, as it is shown."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["auroc"] is not None:
            found.setdefault((row["data"], row["encoder"]), {})[row["method"]] = round(row["auroc"]["mean"], 3)
    return {key: [name for name, mean in means.items() if mean == max(means.values())] for key, means in found.items()}


def _figure(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "failed"
    if figure["deviation"] is None:
        return f"{figure['mean']:.3f}       "
    return f"{figure['mean']:.3f} ±{figure['deviation']:.3f}"


def _training_line(training: Mapping[str, Any], *, named: bool) -> str:
    choice, rate, peak = training["fast_path_choice"], training["pairs_per_second"], training["peak_allocated_bytes"]
    where = f" · {training['data']} · {training['encoder']}" if named else ""
    times = f" ×{choice['stack']}" if choice["stack"] > 1 else ""
    graph = ", CUDA graph" if choice["cuda_graph"] else ""
    memory = f", {format_bytes(peak)}" if peak else ""
    sizes = f"batch {training['effective_batch_size']:,}"
    if training["accumulation_steps"] > 1:
        sizes += f" in passes of {training['micro_batch_size']:,}"
    speed = f", {rate:,.0f} pairs/s" if rate else ""
    return f"{training['method']}{where}: {training['fast_path']}{times}{graph}, {sizes}{speed}{memory}"
