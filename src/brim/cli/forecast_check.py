"""Bytes by module, and a forecast's check, as tables that fit 80 columns; a narrower terminal wraps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.errors import plural
from brim.planning.forecast_base import shown_size
from brim.planning.forecast_check import FAILING, fits_its_card
from brim.planning.forecast_markdown import change_text, headline, largest_part, module_name, signed_bytes
from brim.settings.sizes import format_bytes
from brim.units import byte_unit

if TYPE_CHECKING:
    from brim.planning.forecast import CardForecast, ForecastResult
    from brim.planning.forecast_check import CheckedWorkload, ComparedSize, ForecastCheck, Verdict

__all__ = ["print_check", "print_modules"]

SHORTEST_FOLD = 8  # of a long name
GAP = 2  # between columns
MOST_MODULES = 25  # rows that are printed; --json has all
MOST_CHANGED = 10
# Columns of a table by module: what little room there is goes to what grows with a model or a batch.
COLUMNS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim.": ("optimizer_state",),
    "activ.": ("activations",),
    "temp.": ("temporary",),
    "other": ("inputs", "kv_cache", "workspaces"),
}
_Row = tuple[str, str, Sequence[str], Text]  # workload, card, figures, verdict
STYLES = {"ok": "green", "new": "yellow", "gone": "yellow"}


def print_modules(console: Console, name: str, document: Mapping[str, Any]) -> None:
    """Where the bytes of the peak are, module by module, most first; under a name, where there are several."""
    size = shown_size(document)
    rows = size["by_module"]
    unit = byte_unit(row["bytes"] for row in rows)
    console.print()
    if name:
        _say(console, f"{name} on {document['gpu']['key']}:")
    total = format_bytes(size["peak_allocated_bytes"])
    _say(console, f"by module at the peak of batch size {size['batch_size']:,} ({total} allocated), in {unit.name}:")
    shown = {
        title: parts
        for title, parts in COLUMNS.items()
        if any(row["parts"].get(part) for row in rows for part in parts)
    }
    table = _table("module", "in all", *shown)
    for row in rows[:MOST_MODULES]:
        _add_module(table, module_name(row["module"]), row["bytes"], row["parts"], shown, unit.size)
    rest = rows[MOST_MODULES:]
    if rest:
        parts = {part: sum(row["parts"].get(part, 0) for row in rest) for part in {p for r in rest for p in r["parts"]}}
        more = f"(and {len(rest):,} more)"
        _add_module(table, more, sum(row["bytes"] for row in rest), parts, shown, unit.size)
    _print_table(console, table)


def _add_module(
    table: Table, name: str, total: int, parts: Mapping[str, int], shown: Mapping[str, Sequence[str]], unit: int
) -> None:
    cells = [sum(parts.get(part, 0) for part in columns) for columns in shown.values()]
    table.add_row(Text(name), _figure(total, unit), *(_figure(count, unit) for count in cells))


def _figure(count: int, unit: int) -> Text:
    return Text(f"{count / unit:,.2f}" if count else "-", style="" if count else "dim")


def print_check(console: Console, result: ForecastResult) -> None:
    """Every workload's verdict, then the modules behind those that grew, and the verdict over all."""
    check = result.check
    assert check is not None
    if check.against is None:
        _print_workloads(console, result)
    else:
        _print_comparison(console, check, {workload.name: workload.cards for workload in result.workloads})
    for line in check.lines:
        if line.failed and line.verdict != "grew":
            _say(console, f"{line.name}: {line.text}")
        if line.worst is not None and line.worst.grew:
            _print_growth(console, line)
    for note in check.notes:
        _say(console, f"note: {note}")
    console.print()
    console.print(f"{'ok' if check.ok else 'FAILED'}: {headline(check)}", style="" if check.ok else "bold red")


def _print_workloads(console: Console, result: ForecastResult) -> None:
    """Workloads held to their cards alone."""
    assert result.check is not None
    verdicts = {line.name: line for line in result.check.lines}
    rows: list[_Row] = []
    for workload in result.workloads:
        if not workload.cards:
            rows.append((workload.name, "", [""] * 4, _verdict(verdicts[workload.name].verdict)))
        for card in workload.cards:
            size = shown_size(card.document)
            figures = [
                f"{size['batch_size']:,}", format_bytes(size["peak_allocated_bytes"]),
                format_bytes(size["device_bytes"]), f"{card.batch_size_max:,}",
            ]  # fmt: skip
            verdict = _verdict("ok" if fits_its_card(card.document) else "does_not_fit")
            rows.append((workload.name, card.gpu.key, figures, verdict))
    _print_rows(console, "memory", "", ("size", "allocated", "nvidia-smi", "largest"), rows)


def _print_rows(console: Console, what: str, against: str, titles: Sequence[str], rows: Sequence[_Row]) -> None:
    """A line for each workload; the card is in the title where it is the same for all."""
    cards = sorted({card for _, card, _, _ in rows if card})
    several = len(cards) > 1
    _say(console, f"{what}{f' on {cards[0]}' if len(cards) == 1 else ''}{against}")
    table = _table("workload", *(["card"] if several else []), *titles, "verdict")
    for name, card, figures, verdict in rows:
        table.add_row(Text(name), *([Text(card)] if several else []), *map(Text, figures), verdict)
    _print_table(console, table)


def _print_comparison(console: Console, check: ForecastCheck, cards: Mapping[str, Sequence[CardForecast]]) -> None:
    rows: list[_Row] = []
    for line in check.lines:
        size, verdict = line.worst, _verdict(line.verdict)
        if size is not None:
            rows.append((line.name, size.gpu, [*_figures(size), line.allow], verdict))
            continue
        rows += [
            (line.name, card.gpu.key, _figures_alone(card.document), verdict) for card in cards.get(line.name, ())
        ] or [(line.name, "", [""] * 5, verdict)]
    titles = ("size", "base", "now", "change", "allowed")
    _print_rows(console, "peak allocated bytes", f" against {check.against}", titles, rows)
    for line in check.lines:
        for card, (before, now) in line.batch_size_max.items():
            if before is not None and before != now:
                _say(console, f"{line.name}: the largest batch size that fits {card} was {before:,}, it is {now:,}")


def _figures(size: ComparedSize) -> list[str]:
    return [f"{size.batch_size:,}", format_bytes(size.base_bytes), format_bytes(size.bytes), change_text(size)]


def _figures_alone(document: Mapping[str, Any]) -> list[str]:
    size = shown_size(document)
    return [f"{size['batch_size']:,}", "", format_bytes(size["peak_allocated_bytes"]), "", ""]


def _print_growth(console: Console, line: CheckedWorkload) -> None:
    size = line.worst
    assert size is not None
    console.print()
    _say(
        console,
        f"{line.name} at batch size {size.batch_size:,}: {signed_bytes(size.change_bytes)} ({change_text(size)}), "
        f"allowed {format_bytes(size.allowed_bytes) if size.allowed_bytes else '0'}",
    )
    if not size.modules:
        return
    table = _table("module", "base", "now", "change", "most of it")
    for one in size.modules[:MOST_CHANGED]:
        table.add_row(
            Text(module_name(one.module)), Text(format_bytes(one.base_bytes)), Text(format_bytes(one.bytes)),
            Text(signed_bytes(one.change_bytes)), Text(largest_part(one.parts)),
        )  # fmt: skip
    _print_table(console, table)
    if len(size.modules) > MOST_CHANGED:
        _say(console, f"and {plural(len(size.modules) - MOST_CHANGED, 'more module')} that changed (--json has all)")


def _verdict(verdict: Verdict) -> Text:
    shown = verdict.replace("_", " ")
    return Text(shown.upper() if verdict in FAILING else shown, style=STYLES.get(verdict, "bold red"))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _print_table(console: Console, table: Table) -> None:
    """Long names are folded, figures never: in a terminal that is too narrow for them its lines wrap."""
    for column in table.columns:
        widths = [cell.cell_len for cell in (column.header, *column.cells) if isinstance(cell, Text)]
        column.min_width = min(max(widths), SHORTEST_FOLD) if column.overflow == "fold" else max(widths)
    least = sum(column.min_width or 0 for column in table.columns) + GAP * (len(table.columns) - 1)
    table.width = least if least > console.width else None
    console.print(table, soft_wrap=True)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    words = {"module", "workload", "card", "verdict", "most of it"}
    for title in titles:
        long = title in ("module", "workload")
        table.add_column(
            Text(title), justify="left" if title in words else "right", no_wrap=not long,
            overflow="fold" if long else "ellipsis",
        )  # fmt: skip
    return table
