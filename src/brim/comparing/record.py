"""The folder of a comparison: run.json and comparison.csv, written at the end or when it is stopped before.

with kept_comparison(output, command="eval --compare-batch", request=…, note=…) as draft:
    draft.table = ComparedSizes(sizes)
    …                                      # Ctrl-C in here keeps what is measured
draft.comparison()
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from brim.errors import RequestError
from brim.settings.caller import given
from brim.storage.files import csv_text, write_atomic
from brim.storage.run_folder import write_run
from brim.storage.run_lock import locked_folder

__all__ = ["KIND", "TABLE_FILE", "Comparison", "ComparisonDraft", "ComparisonTable", "kept_comparison"]

KIND = "comparison"
TABLE_FILE = "comparison.csv"


class ComparisonTable(Protocol):
    """What is compared: complete rows and a recommendation at any time."""

    def rows(self) -> list[dict[str, Any]]: ...

    def recommendation(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison that has ended: its rows, what they recommend, and its folder."""

    folder: Path
    rows: list[dict[str, Any]]
    recommendation: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether no row was measured."""
        return all(row.get("failed") for row in self.rows)

    def document(self, schema: str, **more: Any) -> dict[str, Any]:
        """The rows and the rest, as `--json` prints them."""
        return {
            "schema": schema, **more, "rows": self.rows, "recommendation": self.recommendation,
            "notes": list(self.notes), "folder": str(self.folder),
        }  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class ComparisonDraft:
    """A comparison under way; `table` and `environment` are set once they are known."""

    folder: Path
    table: ComparisonTable | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def comparison(self) -> Comparison:
        """What is known so far."""
        assert self.table is not None, "a comparison has a table"
        return Comparison(
            folder=self.folder, rows=self.table.rows(), recommendation=self.table.recommendation(),
            notes=tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip


@contextlib.contextmanager
def kept_comparison(
    output: Path | None, *, command: str, request: Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[ComparisonDraft]:
    """A draft whose table is written to its folder at the end, and on Ctrl-C; other errors leave nothing behind."""
    started_at = datetime.datetime.now(datetime.UTC)
    asked = {**request, "command": command}
    with locked_folder(output, command="compare", note=note) as folder:
        _refuse_used(folder)
        draft = ComparisonDraft(folder=folder)
        try:
            yield draft
        except KeyboardInterrupt:
            if draft.table is not None and any(row.get("rounds") for row in draft.table.rows()):
                _write(draft, asked, started_at, interrupted=True)
                note(f"what is measured is kept in {folder}; a comparison is not resumed, but started again")
            raise
        _write(draft, asked, started_at, interrupted=False)


def _refuse_used(folder: Path) -> None:
    used = next((name for name in ("run.json", "samples.jsonl", "cells.jsonl") if (folder / name).exists()), None)
    if used is not None:
        raise RequestError(
            f"{given('output', folder)}: it holds a run ({used}), and a comparison has a folder of its own; choose "
            "another folder"
        )


def _write(
    draft: ComparisonDraft, request: dict[str, Any], started_at: datetime.datetime, *, interrupted: bool
) -> None:
    found = draft.comparison()
    write_atomic(draft.folder / TABLE_FILE, csv_text([_flat(row) for row in found.rows]))
    write_run(
        draft.folder,
        kind=KIND,
        request=request,
        environment=draft.environment,
        plan=None,
        summary={
            "rows": found.rows, "recommendation": found.recommendation, "notes": list(found.notes),
            "interrupted": interrupted,
        },
        started_at=started_at,
    )  # fmt: skip


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The single figures of a row, without lists and what is nested."""
    return {name: value for name, value in row.items() if not isinstance(value, dict | list | tuple)}
