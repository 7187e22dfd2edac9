"""`brim advise`: what to change, why, what it should bring and the exact command; rounds as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from brim.advice.advise import AdviceResult
from brim.advice.advise import advise as advise_as
from brim.advice.rounds import Rounds
from brim.cli.console import error_console, output_console, print_document
from brim.settings.advise_settings import AdviseSettings
from brim.units import bytes_text, duration_text

__all__ = ["advise"]


def advise(settings: AdviseSettings) -> None:
    """Print the advice, what was tried, the rounds."""
    progress = error_console()
    result = advise_as(settings, note=lambda line: progress.print(line, highlight=False))
    if settings.json_output:
        print_document(result.document)
        return
    console = output_console()
    if result.rounds is None or settings.apply is not None:
        _print_advice(console, result)
    if result.rounds is not None:
        console.print(_rounds_table(result.rounds), soft_wrap=False)
    if result.written is not None:
        console.print(f"settings in {result.written}", highlight=False)


def _print_advice(console: Console, result: AdviceResult) -> None:
    if not result.advice:
        console.print("nothing to change: no rule found a cause that settings would remove", highlight=False)
    tried = {one.name: one for one in result.tried}
    for number, one in enumerate(result.advice, start=1):
        console.print(f"{number}. {one.cause} ({one.name}; {one.gain_text})", highlight=False, style="bold")
        lines = [one.evidence, one.command]
        if one.name in tried:
            lines.insert(1, f"tried: {tried[one.name].text}")
        for line in lines:
            console.print(f"   {line}", highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)


def _rounds_table(rounds: Rounds) -> Table:
    table = Table(box=None, pad_edge=False, expand=False)
    for name in ("round", "settings", "memory forecast", "measured", "samples/s", "time", "brought", "risk"):
        table.add_column(name, overflow="fold")
    for one in rounds.rounds:
        table.add_row(*_cells(one))
    return table


def _cells(one: Mapping[str, Any]) -> list[str]:
    name = "original" if one["round"] == 0 else str(one["round"])
    changed = ", ".join(f"{key}={'default' if value is None else value}" for key, value in one["settings"].items())
    rate, gain, expected = one["samples_per_second"], one["gain"], one["expected_gain"]
    brought = "—" if gain is None else f"{gain['value']:.2f}×" + ("" if gain["clear"] else " (not clear)")
    if gain is None and expected is not None:
        brought = f"{expected:.2g}× expected"
    return [
        f"{name} (back)" if one["rolled_back"] else name, changed or "—", bytes_text(one["memory_forecast_bytes"]),
        bytes_text(one["memory_measured_bytes"]), "—" if rate is None else f"{rate:,.1f}",
        duration_text(one["seconds"]), brought, one["risk"],
    ]  # fmt: skip
