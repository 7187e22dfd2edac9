"""`brim find`: the fastest batch size that fits, with the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli.console import error_console, output_console, print_document
from brim.cli.run_report import leave_report

if TYPE_CHECKING:
    from brim.records import Plan
    from brim.settings.find_settings import FindSettings

__all__ = ["find"]


def find(settings: FindSettings) -> None:
    """Search with a table of the probes, and print the plan."""
    from brim.cli.probe_table import ProbeTable
    from brim.planning.find import find as search
    from brim.ranks.world import current_world

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
    from brim.cli.probe_table import plan_line
    from brim.ranks.world import current_world

    if current_world().rank > 0:
        return
    if json_output:
        print_document(plan.to_json())
        return
    console = output_console()
    console.print(plan_line(plan), markup=False, highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
