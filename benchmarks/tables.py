"""Markdown tables as rows, and ratios between them: what `python -m benchmarks` reads from a benchmark's output.

Knows nothing of which benchmarks there are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Ratio", "Table", "markdown", "measured_ratios", "read_tables"]

Row = dict[str, str]
NOTE = "note"  # what stands behind the last column of a row

_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_RULE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+\s*")


@dataclasses.dataclass(frozen=True)
class Table:
    """One table that a benchmark printed, its cells as text."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio within one run, as it is found in the tables of the run.

    Without `over` the column is a ratio already. With it, each row that `of` selects is divided by the row that `over`
    selects, where the rows agree in the column `by`. A selection is a text that the cell of a column begins with.
    """

    what: str
    column: str
    _: dataclasses.KW_ONLY
    of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    over: Mapping[str, str] | None = None
    over_column: str = ""  # if the two stand in one row
    by: str = ""
    better: str = ""  # "more" or "less"; otherwise neither is
    small: bool = True  # whether it says anything about models that a CPU runs in seconds


def read_tables(text: str) -> list[Table]:
    """Every Markdown table of a text."""
    lines = text.splitlines()
    found = []
    position = 0
    while position + 1 < len(lines):
        if not (lines[position].startswith("|") and _RULE.fullmatch(lines[position + 1])):
            position += 1
            continue
        columns = _distinct(_cells(lines[position]))
        position += 2
        rows = []
        while position < len(lines) and lines[position].startswith("|"):
            cells = _cells(lines[position])
            rows.append(dict(zip((*columns, NOTE), cells, strict=False)))
            position += 1
        found.append(Table(tuple(columns), tuple(rows)))
    return found


def measured_ratios(wanted: Sequence[Ratio], tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Of each ratio its lowest and highest value in the run; one that the run has no rows for is left out."""
    found = []
    for ratio in wanted:
        values = [value for table in tables for value in _values(ratio, table)]
        if values:
            found.append(
                {"what": ratio.what, "low": min(values), "high": max(values), "rows": len(values),
                 "better": ratio.better}
            )  # fmt: skip
    return found


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; what would end a cell is escaped."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]
    return cells if cells[-1] else cells[:-1]  # the empty one is behind the last bar


def _distinct(columns: Sequence[str]) -> list[str]:
    """A name that comes again gets a number: `error`, `error 2`."""
    seen = [columns[: position + 1].count(name) for position, name in enumerate(columns)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(columns, seen, strict=True)]


def _values(ratio: Ratio, table: Table) -> Iterator[float]:
    if ratio.column not in table.columns:
        return
    chosen = [row for row in table.rows if _matches(row, ratio.of)]
    if ratio.over is None and not ratio.over_column:
        for row in chosen:
            yield from _numbers(row.get(ratio.column, ""))
        return
    for row in chosen:
        base = row if ratio.over is None else _base(ratio, table, row)
        above = _number(row.get(ratio.column, ""))
        below = _number(base.get(ratio.over_column or ratio.column, "")) if base is not None else None
        if above is not None and below:
            yield above / below


def _base(ratio: Ratio, table: Table, row: Row) -> Row | None:
    same = [one for one in table.rows if _matches(one, ratio.over or {}) and one.get(ratio.by) == row.get(ratio.by)]
    return same[0] if same else None


def _matches(row: Row, wanted: Mapping[str, str]) -> bool:
    return all(_plain(row.get(column, "")).startswith(text) for column, text in wanted.items())


def _plain(cell: str) -> str:
    return cell.replace("**", "").replace("`", "").strip()


def _number(cell: str) -> float | None:
    found = _numbers(cell)
    return found[0] if found else None


def _numbers(cell: str) -> list[float]:
    """The number of a cell, both of `1.01 to 1.04`, the newer one of `0.98 → 0.99`; an interval in brackets is none."""
    plain = _plain(cell).rpartition("→")[2].partition("(")[0]
    return [_value(one) for one in _NUMBER.findall(plain)[: 2 if " to " in plain else 1]]


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))
