"""`brim find`: the fastest batch size that fits, with a live table of the probes."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brim.cli.console import error_console, output_console, print_document
from brim.cli.report import leave_report
from brim.planning.find import find as search
from brim.ranks.world import current_world
from brim.records import Plan, Probe, SearchSeconds
from brim.searching.find import SearchListener
from brim.settings.find_settings import FindSettings
from brim.settings.sizes import format_bytes
from brim.sizing.probing import ProbeContext

__all__ = ["ProbeTable", "find", "plan_line", "seconds_line"]

SHOWN_SECONDS = 0.05  # parts that took less are not named


def find(settings: FindSettings) -> None:
    """Search with a table of the probes, and print the plan."""
    quiet = settings.json_output
    console = error_console() if quiet else output_console()
    table = ProbeTable(console, quiet=current_world().rank > 0 or (quiet and not console.is_terminal))
    try:
        found = search(settings, listener=table)
    finally:
        table.close()
    _show(found.plan, json_output=quiet)  # before anything is written: a full disk must not lose the answer
    if settings.output is not None:
        found.write()
        leave_report(settings.output)


def _show(plan: Plan, *, json_output: bool) -> None:
    if current_world().rank > 0:
        return
    if json_output:
        print_document(plan.to_json())
        return
    console = output_console()
    console.print(plan_line(plan), markup=False, highlight=False)
    if plan.seconds is not None and not plan.cached:
        console.print(seconds_line(plan.seconds), markup=False, highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


_COLOURS = {"fits": "green", "oom": "red", "thrashes": "yellow", "size_limit": "magenta", "timeout": "yellow"}
_ROW = "{:>7}  {:<10}  {:>11}  {:>11}  {:>7}  {:>13}"
_HEAD = _ROW.format("size", "verdict", "allocated", "reserved", "retries", "samples/s")


class ProbeTable(SearchListener):
    """Draws every probe as it ends: a live table on a terminal, a line each elsewhere, nothing when `quiet`."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self._probes: list[Probe] = []
        self._trying: int | None = None
        self._live: Live | None = None

    def started(self, context: ProbeContext) -> None:
        if self.quiet:
            return
        limit, resident = format_bytes(context.limit_bytes), format_bytes(context.base_bytes)
        text = f"{context.device}: {limit} to use, {resident} resident"
        self.console.print(text, markup=False, highlight=False)
        if self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=8)
            self._live.start()

    def trying(self, size: int) -> None:
        self._trying = size
        self._draw()

    def tried(self, probe: Probe) -> None:
        self._trying = None
        self._probes.append(probe)
        if not self.quiet and self._live is None:
            if len(self._probes) == 1:
                self.console.print(_HEAD, markup=False, highlight=False)
            self.console.print(_ROW.format(*_cells(probe)), markup=False, highlight=False)
        self._draw()

    def close(self) -> None:
        """Stop drawing; the table stays on the screen."""
        self._trying = None
        self._draw()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1))
        for name in ("size", "verdict", "allocated", "reserved", "retries", "samples/s"):
            table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
        for probe in self._probes:
            cells = _cells(probe)
            table.add_row(*(Text(cell, style=_COLOURS.get(probe.verdict, "red") if i == 1 else "")
                            for i, cell in enumerate(cells)))  # fmt: skip
        if self._trying is not None:
            table.add_row(str(self._trying), Text("…", style="dim"), "", "", "", "")
        return table


def plan_line(plan: Plan) -> str:
    """The plan in one line: the size, why, the largest safe size, the headroom left."""
    largest = f"largest seen to fit {plan.batch_size_max}"
    if plan.batch_size_max_estimate is not None and plan.batch_size_max_estimate > plan.batch_size_max:
        largest += f" (about {plan.batch_size_max_estimate} expected)"
    headroom = "unknown"
    if plan.memory.headroom_bytes is not None:
        headroom = f"{format_bytes(plan.memory.headroom_bytes)} of {format_bytes(plan.memory.limit_bytes)}"
    return f"batch size {plan.size}: {plan.reason}; {largest}; headroom {headroom}"


def seconds_line(seconds: SearchSeconds) -> str:
    """How long the search took, and which parts took most of it."""
    parts = dataclasses.asdict(seconds)
    shown = [f"{name.replace('_', ' ')} {taken:.1f} s" for name, taken in parts.items() if taken >= SHOWN_SECONDS]
    return f"searched for {seconds.total:.1f} s" + (f" ({', '.join(shown[1:])})" if len(shown) > 1 else "")


def _cells(probe: Probe) -> tuple[str, ...]:
    rate = "—" if probe.samples_per_second is None else f"{probe.samples_per_second:,.1f}"
    return (
        str(probe.batch_size),
        probe.verdict,
        format_bytes(probe.peak_allocated_bytes),
        format_bytes(probe.peak_reserved_bytes),
        str(probe.alloc_retries),
        rate,
    )
