"""`brim forecast`: peak memory and batch size for a named card, before any GPU is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.console import error_console, output_console, print_document

if TYPE_CHECKING:
    from brim.planning.forecast import ForecastResult
    from brim.settings.find_settings import ForecastSettings

__all__ = ["forecast"]


def forecast(settings: ForecastSettings) -> None:
    """Print a forecast, the table of language models, or the cards that are known."""
    if settings.gpus:
        _list_gpus(json_output=settings.json_output)
        return
    if settings.table:
        _show_batch_table(json_output=settings.json_output)
        return
    from brim.cli.forecast_table import print_forecasts
    from brim.planning.forecast import forecast as run

    result = run(settings, note=_note)
    if settings.json_output:
        print_document(result.document)
    else:
        print_forecasts(output_console(), [dict(card.document) for card in result.cards])
    if settings.plot is not None:
        _draw(result, settings.plot)


def _note(line: str) -> None:
    error_console().print(f"note: {line}", markup=False, highlight=False)


def _draw(result: ForecastResult, path: Path) -> None:
    from brim.cli.forecast_page import forecast_page
    from brim.reporting.page import render
    from brim.storage.files import write_atomic

    write_atomic(path, render(forecast_page([dict(card.document) for card in result.cards])))
    error_console().print(f"drawn in {path}", markup=False, highlight=False)


def _list_gpus(*, json_output: bool) -> None:
    from brim.cli.forecast_table import print_gpus
    from brim.forecasting.gpus import catalogue
    from brim.planning.forecast import gpu_document

    if json_output:
        print_document({"schema": "brim.gpus/1", "gpus": [gpu_document(card) for card in catalogue()]})
        return
    print_gpus(output_console(), catalogue())


def _show_batch_table(*, json_output: bool) -> None:
    from brim.cli.forecast_table import print_batch_table
    from brim.planning.forecast import language_model_table

    console = error_console()
    if console.is_terminal:
        with console.status("tracing") as status:
            result = language_model_table(told=lambda what: status.update(f"tracing {what}"))
    else:
        result = language_model_table()
    if json_output:
        print_document(result.to_json())
        return
    print_batch_table(output_console(), result)
