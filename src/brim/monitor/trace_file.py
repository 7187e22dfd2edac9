"""`monitor.csv`: what a row holds, how rows reach the disk without ever failing a run, and how they are read back.

It knows neither where the figures come from nor when they are taken.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.sizes import format_bytes

__all__ = ["COLUMNS", "MonitorSample", "TraceFile", "TraceText", "read_rows"]

FLUSH_SECONDS = 5.0  # rows wait at most this long in memory; a killed process loses those

_NO_REASON = "none"  # an empty cell would mean that the driver does not report it
_WHOLE_NUMBERS = ("_bytes", "_mhz", "_c")  # ends of the columns that hold them


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorSample:
    """One row; the fields are the columns."""

    time_seconds: float  # since the start of the run; a resumed run continues from its last row
    gpu_utilisation: float | None
    gpu_memory_used_bytes: int | None
    gpu_memory_process_bytes: int | None
    gpu_memory_others_bytes: int | None
    gpu_power_watts: float | None
    gpu_sm_clock_mhz: int | None
    gpu_memory_clock_mhz: int | None
    gpu_temperature_c: int | None
    throttle_reasons: tuple[str, ...] | None
    host_cpu: float | None
    host_memory_available_bytes: int | None
    process_rss_bytes: int | None

    def short_text(self) -> str:
        """`GPU 97% 17.3 GiB`, of the card; `CPU 45% 1.2 GiB`, of the host and this process, where there is none."""
        own, card = self.gpu_memory_process_bytes, self.gpu_memory_used_bytes
        if self.gpu_utilisation is None and card is None:
            name, busy, memory = "CPU", self.host_cpu, self.process_rss_bytes
        else:
            name, busy, memory = "GPU", self.gpu_utilisation, card if own is None else own
        used = "" if memory is None else f" {format_bytes(memory)}"
        return f"{name} {'—' if busy is None else f'{busy:.0%}'}{used}"


COLUMNS = tuple(field.name for field in dataclasses.fields(MonitorSample))


class TraceFile:
    """The rows on disk, appended every few seconds; the first failure is kept in `error` and ends the writing.

    The file is opened for each write: a folder that vanished is noticed (an open file would take the rows and
    lose them), and a forked child inherits no half-filled buffer of a file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.error: str | None = None
        self.resumed_at_seconds = 0.0
        self._pending: list[str] = []
        self._flushed_at = time.monotonic()

    def open(self) -> None:
        """Make the file, or take up the one that an earlier part of the run left."""
        self._try(self._take_up)

    def append(self, sample: MonitorSample) -> None:
        if self.path is None or self.error is not None:
            return
        self._pending.append(_row(sample))
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if lines:
            self._try(lambda path: _append(path, lines, os.O_APPEND))

    def _try(self, action: Callable[[Path], None]) -> None:
        if self.path is None:
            return
        try:
            action(self.path)
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            self.error = f"cannot write {self.path}: {reason}; the trace ends here, the run continues"

    def _take_up(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]  # the rest is a row that a kill cut
        header, *rows = complete.decode(errors="replace").splitlines() or [""]
        if header and header != ",".join(COLUMNS):
            raise RequestError("it holds other columns than this version of brim writes")
        if len(complete) < len(content):
            os.truncate(path, len(complete))
        if not header:
            _append(path, [",".join(COLUMNS)], os.O_APPEND | os.O_CREAT)
        whole = (row for row in (_parse_row(line, COLUMNS) for line in reversed(rows)) if row is not None)
        self.resumed_at_seconds = next(whole, {"time_seconds": 0.0})["time_seconds"]


class TraceText:
    """The rows in memory, for a process on another machine: whenever it is killed, it leaves no file behind."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.resumed_at_seconds = 0.0
        self._rows = [",".join(COLUMNS)]

    def open(self) -> None:
        """Nothing to make."""

    def append(self, sample: MonitorSample) -> None:
        self._rows.append(_row(sample))

    def flush(self) -> None:
        """Nothing to write."""

    def text(self) -> str:
        """What the file would hold."""
        return "\n".join(self._rows) + "\n"


def _append(path: Path, lines: list[str], flags: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | flags, 0o644), "ab") as file:
        file.write(("\n".join(lines) + "\n").encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `monitor.csv`, by column: numbers, None for an empty cell, a tuple for the throttle reasons.

    A row that a kill cut, or that is otherwise not whole, is left out; a file that is not there has no rows.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    complete = content[: content.rfind(b"\n") + 1]
    header, *lines = complete.decode(errors="replace").splitlines() or [""]
    columns = header.split(",")
    return [row for row in (_parse_row(line, columns) for line in lines) if row is not None]


def _row(sample: MonitorSample) -> str:
    return ",".join(_cell(getattr(sample, column)) for column in COLUMNS)


def _cell(value: float | tuple[str, ...] | None) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "|".join(value) or _NO_REASON
    return str(round(value, 4))


def _parse_row(line: str, columns: Sequence[str]) -> dict[str, Any] | None:
    """A row by column; None where it is not whole."""
    cells = line.split(",")  # a cell is a number or plain names: nothing is ever quoted
    try:
        row = {column: _parse_cell(column, cell) for column, cell in zip(columns, cells, strict=True)}
    except ValueError:  # not a number, or not as many cells as columns
        return None
    return row if row.get("time_seconds") is not None else None


def _parse_cell(column: str, cell: str) -> float | tuple[str, ...] | None:
    if not cell:
        return None
    if column == "throttle_reasons":
        return () if cell == _NO_REASON else tuple(cell.split("|"))
    return int(cell) if column.endswith(_WHOLE_NUMBERS) else float(cell)
