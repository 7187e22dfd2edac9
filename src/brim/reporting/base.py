"""What a page is made of: sections, each with words, figures and a table. Plain values, drawn by nobody yet.

A section with a figure has a table of the same rows, and every figure says in words what is to be seen in it: that is
held here, so that no kind of run can forget it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.reporting.units import text

__all__ = ["Cell", "Column", "Fact", "Key", "Page", "Panel", "Row", "Section", "Spec", "Table"]

Row = Mapping[str, Any]
Spec = dict[str, Any]  # a Vega-Lite specification

_LONG = 26  # characters of a cell that need not stand in one line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a legend; the page draws it, not the chart, so that it wraps on a phone."""

    label: str
    colour: str  # a CSS colour
    mark: str = "circle"  # a Vega symbol, `line`, `dashed`, `bar`, `ring`, `cross` or `none`
    filled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of a figure, and what is to be seen in it for those who cannot see it."""

    title: str
    spec: Spec
    alternative: str
    keys: tuple[Key, ...] = ()

    def __post_init__(self) -> None:
        assert self.alternative.strip(), f"the chart {self.title} says nothing to those who cannot see it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in one place of a table."""

    text: str
    link: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One column: which field of a row it shows, and how."""

    title: str
    field: str
    show: Callable[[Any], str] = text
    words: bool = False  # words stand on the left, figures on the right
    link: str | None = None  # the field that holds where the cell leads to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns; the first column names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]

    def cells(self) -> list[list[Cell]]:
        """Every row as it is written."""
        return [
            [
                Cell(text=column.show(row.get(column.field)), link=row.get(column.link) if column.link else None)
                for column in self.columns
            ]
            for row in self.rows
        ]

    def styles(self) -> list[str]:
        """Each column's classes in the style sheet: figures, words, or words so long that lines must break."""
        cells = self.cells()
        styles = []
        for place, column in enumerate(self.columns):
            widest = max((len(row[place].text) for row in cells), default=0)
            styles.append("" if not column.words else "words prose" if widest > _LONG else "words")
        return styles

    def known(self) -> Table:
        """The same without the columns of which no row knows anything; the first stays."""
        first, *others = self.columns
        kept = [one for one in others if any(row.get(one.field) not in (None, "") for row in self.rows)]
        return dataclasses.replace(self, columns=(first, *kept))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure of the headline."""

    name: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page."""

    title: str
    paragraphs: tuple[str, ...] = ()
    points: tuple[str, ...] = ()  # short lines, one each
    command: str | None = None
    panels: tuple[Panel, ...] = ()
    caption: str = ""  # of the figure
    table: Table | None = None
    table_open: bool = False  # with no figure above it, a table is the section and stands open

    def __post_init__(self) -> None:
        assert not self.panels or self.table is not None, f"the section {self.title} has a figure but no table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str = ""
    headline: str = ""  # the answer, in one line
    facts: tuple[Fact, ...] = ()
    remarks: tuple[str, ...] = ()  # sentences below the headline
    warnings: tuple[str, ...] = ()  # what a reader must know before trusting the rest
    sections: tuple[Section, ...] = ()
