"""Rows as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["csv_text"]


def csv_text(rows: Sequence[Mapping[str, Any]], *, first: Sequence[str] = ()) -> str:
    """A table with every column that some row has, in order of appearance, after those of `first`; lists as JSON."""
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
