"""`brim cache list|clear`: the plans on disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from brim.cli.console import output_console, print_document
from brim.errors import plural

if TYPE_CHECKING:
    from brim.settings.find_settings import ClearSettings, ListSettings

__all__ = ["clear", "list_plans"]


def list_plans(settings: ListSettings) -> None:
    """List the cached plans, newest first."""
    from rich.table import Table

    from brim.sizing.plans import PlanCache

    cache = PlanCache()
    entries = list(cache.entries())
    if settings.json_output:
        document = [
            {
                "saved_at": entry.saved_at,
                "command": entry.command,
                "model": entry.model,
                "work": entry.work,
                "identity": dict(entry.identity),
                "plan": entry.plan.to_json(),
            }
            for entry in entries
        ]
        print_document({"schema": "brim.cache/1", "folder": str(cache.folder), "plans": document})
        return
    console = output_console()
    if entries:
        table = Table("model", "command", "work", "device", "size", "saved", box=None)
        for entry in entries:
            saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.saved_at))
            size = f"{entry.plan.size} {entry.plan.unit}"
            table.add_row(entry.model, entry.command, entry.work, entry.plan.device, size, saved)
        console.print(table)
    count = plural(len(entries), "plan") if entries else "no plans"
    console.print(f"{count} in {cache.folder}", markup=False, highlight=False)
    if damaged := len(cache.files()) - len(entries):
        text = f"{plural(damaged, 'damaged file')} ignored; `brim cache clear` removes all of them and all plans"
        console.print(text, markup=False, highlight=False)


def clear(settings: ClearSettings) -> None:
    """Remove every cached plan."""
    del settings
    from brim.sizing.plans import PlanCache

    cache = PlanCache()
    output_console().print(
        f"removed {plural(cache.clear(), 'plan')} from {cache.folder}", markup=False, highlight=False
    )
