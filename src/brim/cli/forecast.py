"""`brim forecast`: peak memory and batch size for a named card, before any GPU is touched; as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.cli.console import error_console, output_console, print_document
from brim.planning.forecast_base import shown_size, sizes_of
from brim.records import PART_NAMES, settings_in_words
from brim.settings.sizes import format_bytes

if TYPE_CHECKING:
    from brim.forecasting.gpus import Gpu
    from brim.forecasting.table import BatchTable
    from brim.planning.forecast import ForecastResult
    from brim.settings.forecast_settings import ForecastSettings

__all__ = ["forecast", "print_batch_table", "print_forecasts", "print_gpus"]


def forecast(settings: ForecastSettings) -> bool:
    """Print a forecast, the table of language models, or the cards that are known; whether a check failed."""
    if settings.gpus:
        _list_gpus(json_output=settings.json_output)
        return False
    if settings.table:
        _show_batch_table(json_output=settings.json_output)
        return False
    from brim.planning.forecast import forecast as run

    result = run(settings, note=_note)
    if settings.json_output:
        print_document(result.document)
    else:
        _print_result(result, by_module=settings.by_module is not None)
    if settings.plot is not None:
        _draw(result, settings.plot)
    for file in (settings.save, settings.markdown, settings.output):
        if file is not None and file.exists():
            error_console().print(f"written to {file}", markup=False, highlight=False)
    return result.check is not None and not result.check.ok


def _print_result(result: ForecastResult, *, by_module: bool) -> None:
    from brim.cli.forecast_check import print_check, print_modules

    console = output_console()
    if not result.of_file:
        print_forecasts(console, [dict(card.document) for card in result.cards])
    if by_module:
        several = len(result.cards) > 1
        for workload in result.workloads:
            for card in workload.cards:
                print_modules(console, workload.name if several else "", card.document)
    if result.check is not None:
        if by_module or not result.of_file:
            console.print()
        print_check(console, result)


def _note(line: str) -> None:
    error_console().print(f"note: {line}", markup=False, highlight=False)


def _draw(result: ForecastResult, path: Path) -> None:
    from brim.reporting.kinds.forecast import forecast_page
    from brim.reporting.page import render
    from brim.storage.files import write_atomic

    write_atomic(path, render(forecast_page([dict(card.document) for card in result.cards])))
    error_console().print(f"drawn in {path}", markup=False, highlight=False)


def _list_gpus(*, json_output: bool) -> None:
    from brim.forecasting.gpus import catalogue
    from brim.planning.forecast import gpu_document

    if json_output:
        print_document({"schema": "brim.gpus/1", "gpus": [gpu_document(card) for card in catalogue()]})
        return
    print_gpus(output_console(), catalogue())


def _show_batch_table(*, json_output: bool) -> None:
    from brim.planning.forecast import language_model_table

    console = error_console()
    if console.is_terminal:
        with console.status("tracing") as status:
            result = language_model_table(progress=lambda what: status.update(f"tracing {what}"))
    else:
        result = language_model_table()
    if json_output:
        print_document(result.to_json())
        return
    print_batch_table(output_console(), result)


MOST_SIDE_BY_SIDE = 4  # cards whose figures fit beside each other
Document = Mapping[str, Any]


def print_forecasts(console: Console, documents: Sequence[Document]) -> None:
    """One card in full; of several, each one's answer and their figures side by side."""
    if len(documents) == 1:
        _print_one(console, documents[0])
    else:
        _print_several(console, documents)
    for line in _remarks(documents):
        console.print(line, markup=False, highlight=False)


def print_gpus(console: Console, cards: Sequence[Gpu]) -> None:
    """The catalogue, one line a card."""
    table = _table("card", "memory", "usable", "capability", "kind")
    for card in cards:
        capability = ".".join(map(str, card.compute_capability))
        row = (card.key, format_bytes(card.memory_bytes), format_bytes(card.usable_bytes), capability, card.kind)
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=False)
    console.print("memory is what the driver reports; sources of every figure: brim forecast --gpus --json")


def print_batch_table(console: Console, table: BatchTable) -> None:
    """Card memory down, model size across, once for each mode; in brackets what is written down by hand."""
    modes = list(dict.fromkeys(entry.mode for entry in table.entries))
    cards = list(dict.fromkeys(entry.card_gb for entry in table.entries))
    for mode in modes:
        console.print(f"{'generation' if mode == 'generate' else 'training'}: largest batch size that fits")
        drawn = _table("card", *(model.label for model in table.models), "by hand")
        for card in cards:
            sizes = [table.batch_size(card, model.label, mode) for model in table.models]
            hand = next(entry.by_hand_for_the_card for entry in table.entries if entry.card_gb == card)
            cells = [Text(f"{size:,}" if size else "—", style="" if size else "dim") for size in sizes]
            drawn.add_row(Text(f"{card} GB"), *cells, Text(hand, style="dim"))
        by_hand = [Text(model.by_hand, style="dim") for model in table.models]
        drawn.add_row(Text("by hand", style="dim"), *by_hand, Text(""))
        console.print(drawn, soft_wrap=False)
        console.print()
    console.print("«by hand»: the ranges of a usual guide, by card and by model; — : nothing fits")
    for line in table.method:
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(f"computed in {table.seconds:.0f} s, without a GPU", markup=False, highlight=False)


def _print_one(console: Console, document: Document) -> None:
    card = document["gpu"]
    head = f"{document['model']}, {document['mode']}, on {card['name']}"
    console.print(head, markup=False, highlight=False)
    _print_settings(console, document)
    console.print(
        f"{format_bytes(card['memory_bytes'])} on the card, {format_bytes(document['limit_bytes'])} to use "
        f"(margin {document['margin']:.0%}), CUDA context {format_bytes(card['context_bytes'])} of it",
        markup=False,
        highlight=False,
    )
    sizes = sizes_of(document)
    table = _table("size", "allocated", "reserved", "nvidia-smi", "fits")
    for size in sizes:
        table.add_row(
            Text(f"{size['batch_size']:,}"),
            Text(format_bytes(size["peak_allocated_bytes"])),
            Text(format_bytes(size["peak_reserved_bytes"])),
            Text(format_bytes(size["device_bytes"])),
            _verdict(size["fits"]),
        )
    console.print(table, soft_wrap=False)
    console.print(_answer(document), markup=False, highlight=False)
    shown = shown_size(document)
    console.print(f"\nat batch size {shown['batch_size']:,}:", markup=False, highlight=False)
    console.print(_breakdown(shown), soft_wrap=False)


def _print_several(console: Console, documents: Sequence[Document]) -> None:
    first = documents[0]
    console.print(f"{first['model']}, {first['mode']}", markup=False, highlight=False)
    _print_settings(console, first)
    cards = _table("card", "memory", "to use", "largest size", "nvidia-smi at it")
    for document in documents:
        largest = document["batch_size_max"]
        at_it = next((size for size in sizes_of(document) if size["batch_size"] == largest), None)
        cards.add_row(
            Text(document["gpu"]["key"]),
            Text(format_bytes(document["gpu"]["memory_bytes"])),
            Text(format_bytes(document["limit_bytes"])),
            Text("none fits" if largest == 0 else f"{largest:,}", style="red" if largest == 0 else "green"),
            Text(format_bytes(at_it["device_bytes"]) if at_it else "—"),
        )
    console.print(cards, soft_wrap=False)
    if len(documents) > MOST_SIDE_BY_SIDE:
        return
    console.print("\nas nvidia-smi would show:")
    table = _table("size", *(document["gpu"]["key"] for document in documents))
    by_size = [{size["batch_size"]: size for size in sizes_of(document)} for document in documents]
    for batch_size in sorted({size for sizes in by_size for size in sizes}):
        cells = [_side_cell(sizes.get(batch_size)) for sizes in by_size]
        table.add_row(Text(f"{batch_size:,}"), *cells)
    console.print(table, soft_wrap=False)


def _print_settings(console: Console, document: Document) -> None:
    words = settings_in_words(document["made_for"])
    if words:
        console.print(f"made for {words}", markup=False, highlight=False)


def _side_cell(size: Mapping[str, Any] | None) -> Text:
    if size is None:
        return Text("")
    return Text(format_bytes(size["device_bytes"]), style="" if size["fits"] else "red")


def _breakdown(size: Mapping[str, Any]) -> Table:
    table = _table("", "bytes", "share")
    for part, count in size["breakdown"].items():
        if count:
            share = count / size["device_bytes"]
            table.add_row(Text(PART_NAMES.get(part, part)), Text(format_bytes(count)), Text(f"{share:.1%}"))
    table.add_row(Text("in all"), Text(format_bytes(size["device_bytes"])), Text(""))
    return table


def _answer(document: Document) -> str:
    largest = document["batch_size_max"]
    if largest == 0:
        return "no batch size fits"
    if largest == document["max_batch_size"]:
        return f"the largest batch size tried fits: {largest:,} (--max-batch-size, or the data's length)"
    return f"largest batch size that fits: {largest:,}"


def _remarks(documents: Sequence[Document]) -> list[str]:
    lines = [f"approximate: {document['approximate']}" for document in documents if document["approximate"]]
    lines += [f"note: {note}" for document in documents for note in document["notes"]]
    seconds = max(document["trace_seconds"] for document in documents)
    return [*dict.fromkeys(lines), f"traced in {seconds:.1f} s, without a GPU"]


def _verdict(fits: bool) -> Text:
    return Text("yes" if fits else "no", style="green" if fits else "red")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    words = {"card", "kind", "", "fits", "model", "mode"}
    for name in (first, *others):
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    return table
