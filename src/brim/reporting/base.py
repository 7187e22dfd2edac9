"""What a page is made of: sections, each with words, charts and a table. Plain values, drawn by nobody yet.

A section with a chart has a table of the same figures: that is held here, so that no kind of run can forget it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from brim.advice.run_reader import Run, value_at
from brim.reporting.charts import Chart, Row
from brim.units import UNKNOWN, text

__all__ = [
    "Column", "Fact", "Figure", "Page", "PageTable", "RunKind", "Section", "TableCell", "facts", "figure_table",
    "note_section", "present", "run_columns", "words",
]  # fmt: skip

_LONG = 26  # characters of a cell that need not stand in one line
_Part = TypeVar("_Part")


def present(*parts: _Part | None) -> tuple[_Part, ...]:
    """Those that there are: a chart or a section that has nothing to show is None."""
    return tuple(part for part in parts if part is not None)


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: which field of a row it shows, and how."""

    title: str
    field: str
    show: Callable[[Any], str] = text
    words: bool = False  # words stand on the left, figures on the right
    link: str = ""  # the field that holds where the cell leads to
    always: bool = False  # also where no row knows anything of it


def words(title: str, field: str = "", *, link: str = "") -> Column:
    """A column of words; its field is called like it unless it is given."""
    return Column(title, field or title, words=True, link=link)


@dataclasses.dataclass(frozen=True)
class TableCell:
    """What stands in one place of a table."""

    text: str
    link: str | None = None


@dataclasses.dataclass(frozen=True)
class PageTable:
    """Rows under columns; the first column names the row, and those of which no row knows anything are left out."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        known = [
            one for place, one in enumerate(self.columns)
            if place == 0 or one.always or any(row.get(one.field) not in (None, "") for row in self.rows)
        ]  # fmt: skip
        object.__setattr__(self, "columns", tuple(known))

    def cells(self) -> list[list[TableCell]]:
        """Every row as it is written."""
        return [
            [TableCell(one.show(row.get(one.field)), row.get(one.link) if one.link else None) for one in self.columns]
            for row in self.rows
        ]

    def styles(self) -> list[str]:
        """Each column's classes in the style sheet: figures, words, or words so long that lines must break."""
        cells = self.cells()
        widest = [max((len(row[place].text) for row in cells), default=0) for place in range(len(self.columns))]
        return [
            "" if not one.words else "words prose" if width > _LONG else "words"
            for one, width in zip(self.columns, widest, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Fact:
    """A figure of the headline."""

    name: str
    value: str
    note: str = ""


def facts(*found: Fact | None) -> tuple[Fact, ...]:
    """Those of which something is known."""
    return tuple(one for one in present(*found) if not one.value.startswith(UNKNOWN))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page."""

    title: str
    paragraphs: tuple[str, ...] = ()
    points: tuple[str, ...] = ()  # short lines, one each
    command: str | None = None
    charts: tuple[Chart, ...] = ()
    table: PageTable | None = None
    open: bool | None = None  # whether the table stands open; by default where there is no chart above it

    def __post_init__(self) -> None:
        assert not self.charts or self.table is not None, f"the section {self.title} has a chart but no table"

    @property
    def table_open(self) -> bool:
        """Whether the table is shown without a click."""
        return not self.charts if self.open is None else self.open


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKind:
    """How runs of one kind are shown, declared in the file of `kinds/` that makes the page."""

    name: str  # in run.json
    page: Callable[[Run], Page]
    compare: Callable[[Sequence[Run]], tuple[dict[str, Any], Page]] | None = None  # None: their summaries as tables


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a run, declared once: shown of one run as a row, of several side by side."""

    title: str
    source: str | Callable[[Mapping[str, Any]], object]  # where the run's summary has it, or how it is computed
    show: Callable[[object], str] = text

    def shown(self, summary: Mapping[str, Any]) -> str:
        """As it is written."""
        source = self.source
        return self.show(value_at(summary, source) if isinstance(source, str) else source(summary))


def figure_table(
    caption: str, figures: Sequence[Figure], summaries: Sequence[Mapping[str, Any]], labels: Sequence[str] = ()
) -> PageTable:
    """The figures that any run knows, one row each; with labels there is a column for each run."""
    rows = []
    for figure in figures:
        shown = [figure.shown(summary) for summary in summaries]
        if not all(one.startswith(UNKNOWN) for one in shown):
            rows.append({"name": figure.title, **{str(place): one for place, one in enumerate(shown)}})
    named = run_columns(labels) if labels else (words("value", "0"),)
    return PageTable(caption, (words("figure", "name"), *named), rows)


def run_columns(labels: Sequence[str], show: Callable[[Any], str] = text, *, words: bool = False) -> tuple[Column, ...]:
    """One column for each run, of the fields `0`, `1`, …"""
    return tuple(Column(label, str(place), show, words, always=True) for place, label in enumerate(labels))


def note_section(notes: object) -> Section | None:
    """What a run noted, one line each."""
    lines = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return Section(title="Notes", points=lines) if lines else None
