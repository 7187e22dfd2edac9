"""`brim encode`: molecules to features, each once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from brim.cli.console import SOME_FAILED, error_console, output_console, print_document
from brim.errors import plural

if TYPE_CHECKING:
    from brim.molecules.encoding import EncodedFile
    from brim.settings.molecule_settings import EncodeSettings

__all__ = ["encode"]

SHOWN = 5


def encode(settings: EncodeSettings) -> None:
    """Encode with a progress bar and list what was left out; exit code 1 if some molecules failed."""
    result = _run(settings)
    _show(result, json_output=settings.json_output)
    if result.failures:
        raise typer.Exit(SOME_FAILED)


def _run(settings: EncodeSettings) -> EncodedFile:
    from rich.progress import Progress

    from brim.molecules.encoding import encode as encode_file

    console = error_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(settings.request.model)
        try:
            return encode_file(
                settings,
                on_start=lambda total: progress.update(task, total=total),
                on_batch=lambda done: progress.update(task, completed=done),
                on_note=lambda line: console.print(line, markup=False, highlight=False),
            )
        except KeyboardInterrupt:
            if Path(f"{settings.request.output}.partial.jsonl").exists():
                console.print("finished molecules are kept: continue with --resume", highlight=False)
            raise


def _show(result: EncodedFile, *, json_output: bool) -> None:
    figures = result.figures
    if json_output:
        document = {
            "schema": "brim.encode/1",
            "output": str(result.path),
            "width": result.width,
            "failures": result.failures,
            **figures.to_json(),
        }
        print_document(document)
        return
    console = output_console()
    rows = figures.molecules - figures.failed
    rate = figures.to_json()["samples_per_second"]
    how = "from the cache" if figures.cached else f"{rate:,.0f} molecules/s" if rate else "all from an earlier run"
    size = figures.to_json()["batch_size_used"]
    batch = f", batch {size}" if size else ""
    console.print(f"{plural(rows, 'molecule')} × {result.width} features, {how}{batch}", highlight=False)
    for place, why in list(result.failures.items())[:SHOWN]:
        console.print(f"left out: {place}: {why}", markup=False, highlight=False)
    if len(result.failures) > SHOWN:
        console.print(f"… and {len(result.failures) - SHOWN:,} more: --json lists them", highlight=False)
    console.print(f"in {result.path}", markup=False, highlight=False)
