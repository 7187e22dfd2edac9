"""An append-only journal of JSON lines that survives kill −9 at any byte.

Entries are appended whole, in one write each. What a kill leaves of an unfinished line is cut off when the journal is
opened again, so every complete line is an entry. The first line says what the journal is of; opening it for other work
is an error, never a mixture. A line that was damaged later is left out when the journal is resumed, so that its work is
done again; the file as it was is kept beside.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import RequestError
from brim.storage.files import cannot_write, encode, read_json, write_atomic, write_json
from brim.storage.fingerprint import differing_parts

__all__ = ["JOURNAL_SCHEMA", "Damage", "Journal", "journal_lines", "read_lines"]

JOURNAL_SCHEMA = "brim.journal/1"
HEADER_START = b'{"schema": "brim.journal/'
MOST_SHOWN = 5  # damaged lines that are named
SYNC_SECONDS = 1.0  # at most this much is lost with the machine's power; a killed process loses nothing


Check = Callable[[Mapping[str, Any]], str | None]  # what is wrong with an entry; None: nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """A complete line that is no entry."""

    line: int  # counted from 1
    reason: str


def journal_lines(entries: Iterable[Mapping[str, Any]]) -> bytes:
    """Entries as lines of a journal; what JSON cannot hold is a `RequestError`."""
    lines = []
    for entry in entries:
        try:
            lines.append(json.dumps(entry, ensure_ascii=False, separators=(",", ":")))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"a result cannot be journalled: {error}; return strings, numbers, lists or dictionaries, "
                "or run without a journal"
            ) from error
    return encode("".join(line + "\n" for line in lines))


def read_lines(content: bytes, check: Check | None = None) -> tuple[list[dict[str, Any]], list[Damage]]:
    """The entries of a journal's complete lines, and the lines that are none; an unfinished last line is neither."""
    entries: list[dict[str, Any]] = []
    damaged: list[Damage] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line.decode())
        except UnicodeDecodeError:
            problem: str | None = "not UTF-8"
        except (ValueError, RecursionError):
            problem = "not JSON"
        else:
            problem = "not a JSON object"
            if isinstance(entry, dict):
                problem = None if check is None else check(entry)
        if problem is None:
            entries.append(entry)
        else:
            damaged.append(Damage(line=number, reason=problem))
    return entries, damaged


class Journal:
    """A journal opened for appending.

        with Journal(path, fingerprint=print_of_the_work, resume=True) as journal:
            done = journal.entries            # what an earlier run finished
            journal.append([{"item": 7, "result": "yes"}])

    Without `resume`, a journal that holds entries already is a `RequestError`: nothing is overwritten. With `label`,
    the journal's identity is in that file instead of its first line, so that every line is an entry. `check` says
    what is wrong with an entry that was not written by this work; such a line counts as damaged. `notes` names the
    damaged lines that were left out.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: str,
        resume: bool = False,
        label: Path | None = None,
        check: Check | None = None,
    ) -> None:
        self.path = path
        self.label = label
        self.fingerprint = fingerprint
        self.entries: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._resume = resume
        self._check = check
        self._file = -1
        self._appended = False
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self._make_place()
            self._recover()
        except OSError as error:
            self._close()
            raise cannot_write(self.path, error) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append entries in one write: after a kill, each is there whole or not at all."""
        lines = journal_lines(entries)
        try:
            _write_all(self._file, lines)
            self._appended = True
            if time.monotonic() - self._synced_at >= SYNC_SECONDS:
                os.fsync(self._file)
                self._synced_at = time.monotonic()
        except OSError as error:
            if not self.entries and not self._appended:
                raise cannot_write(self.path, error) from error
            reason = error.strerror or error
            raise RequestError(
                f"cannot write {self.path}: {reason}; what was finished before is kept, resume from it"
            ) from error

    def _make_place(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():  # a device or a pipe may have no end
                raise RequestError(f"{self.path} is not a regular file; give another path for the journal")
            self._open()
        except ValueError as error:  # a null byte
            raise cannot_write(self.path, error) from error

    def _recover(self) -> None:
        """Read what is there, make sure that it is this work's journal, then cut off or leave out what is no entry."""
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        header = self._read_header(content, complete)
        if header is None:
            os.ftruncate(self._file, 0)
            self._write_header({"schema": JOURNAL_SCHEMA, "fingerprint": self.fingerprint})
            return
        start = 0 if self.label is not None else complete.find(b"\n") + 1
        entries, damaged = read_lines(complete[start:], self._check)
        if (entries or damaged) and not self._resume:
            raise RequestError(
                f"{self.path} holds {len(entries)} results of an earlier run; resume it, or give another path"
            )
        if header.get("fingerprint") != self.fingerprint:
            raise self._of_other_work(str(header.get("fingerprint")))
        if damaged:
            self._leave_out(damaged, content, complete[:start])
        elif len(complete) < len(content):
            os.ftruncate(self._file, len(complete))
        self.entries = entries

    def _read_header(self, content: bytes, complete: bytes) -> dict[str, Any] | None:
        """What the journal says it is of; None: nothing is in it yet. A file of anything else is a `RequestError`."""
        found: Any
        if self.label is None:
            if not complete and (content.startswith(HEADER_START) or HEADER_START.startswith(content)):
                return None
            lines, _ = read_lines(complete[: complete.find(b"\n") + 1])
            found = lines[0] if lines else None
        else:
            found = read_json(self.label)
            if not content and not self.label.exists():
                return None
        if not isinstance(found, dict) or found.get("schema") != JOURNAL_SCHEMA:
            raise RequestError(f"{self.path} is not a journal of brim; give another path")
        return found if complete else None

    def _leave_out(self, damaged: list[Damage], content: bytes, header: bytes) -> None:
        """Keep the file as it was beside it, and rewrite it without its damaged lines."""
        names = (self.path.with_name(f"{self.path.name}.damaged{suffix}") for suffix in _suffixes())
        beside = next(path for path in names if not path.exists())
        write_atomic(beside, content)
        numbers = {one.line for one in damaged}
        lines = content[len(header) :].split(b"\n")[:-1]
        kept = (line + b"\n" for number, line in enumerate(lines, start=1) if number not in numbers)
        write_atomic(self.path, header + b"".join(kept))
        self._close()
        self._open()
        before = header.count(b"\n")
        shown = ", ".join(f"{before + one.line} ({one.reason})" for one in damaged[:MOST_SHOWN])
        more = f" and {len(damaged) - MOST_SHOWN} more" if len(damaged) > MOST_SHOWN else ""
        self.notes.append(
            f"{self.path}: damaged line{'s' if len(damaged) > 1 else ''} {shown}{more} left out, what they held is "
            f"computed again; the file as it was is kept as {beside.name}"
        )

    def _of_other_work(self, written_for: str) -> RequestError:
        parts = differing_parts(written_for, self.fingerprint)
        others = f": {' and '.join(parts)} differ" if parts else ""
        return RequestError(
            f"{self.path} was written for other items or settings{others} (fingerprint {written_for}, now "
            f"{self.fingerprint}); resume with what it was started with, or give another path"
        )

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _write_header(self, header: dict[str, Any]) -> None:
        if self.label is not None:
            write_json(self.label, header)
        else:
            _write_all(self._file, (json.dumps(header) + "\n").encode())

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _suffixes() -> Iterable[str]:
    return itertools.chain([""], (f"-{number}" for number in itertools.count(2)))


def _write_all(file: int, data: bytes) -> None:
    """A full disk may take a part of the bytes: it is cut off at the next start like any unfinished line."""
    while data:
        data = data[os.write(file, data) :]
