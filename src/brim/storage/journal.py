"""An append-only journal of JSON lines that survives kill −9 at any byte.

Entries are appended whole, in one write each. What a kill leaves of an unfinished line is cut off when the journal is
opened again, so every complete line is an entry and nothing else is. The first line says what the journal is of;
opening it for other work is an error, never a mixture.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.errors import RequestError
from brim.storage.files import read_json, write_json
from brim.storage.fingerprint import differing_parts

__all__ = ["JOURNAL_SCHEMA", "Journal"]

JOURNAL_SCHEMA = "brim.journal/1"
SYNC_SECONDS = 1.0  # at most this much is lost with the machine's power; a killed process loses nothing


class Journal:
    """A journal opened for appending.

        with Journal(path, fingerprint=print_of_the_work, resume=True) as journal:
            done = journal.entries            # what an earlier run finished
            journal.append([{"item": 7, "result": "yes"}])

    Without `resume`, a journal that holds entries already is a `RequestError`: nothing is overwritten. With `label`,
    what the journal is of stands in that file instead of its first line, so that every line is an entry.
    """

    def __init__(self, path: Path, *, fingerprint: str, resume: bool = False, label: Path | None = None) -> None:
        self.path = path
        self.label = label
        self.fingerprint = fingerprint
        self.entries: list[dict[str, Any]] = []
        self._resume = resume
        self._file = -1
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._recover()
        except OSError as error:
            self._close()
            raise self._cannot(error) from error
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
        lines = []
        for entry in entries:
            try:
                lines.append(json.dumps(entry, ensure_ascii=False, separators=(",", ":")))
            except (TypeError, ValueError) as error:
                raise RequestError(
                    f"a result cannot be journalled: {error}; return strings, numbers, lists or dictionaries, "
                    "or run without a journal"
                ) from error
        try:
            _write_all(self._file, ("\n".join(lines) + "\n").encode())
            if time.monotonic() - self._synced_at >= SYNC_SECONDS:
                os.fsync(self._file)
                self._synced_at = time.monotonic()
        except OSError as error:
            raise self._cannot(error) from error

    def _recover(self) -> None:
        """Read what is there, cut off an unfinished last line, and make sure that it is this work's journal."""
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            os.ftruncate(self._file, len(complete))
        lines = complete.decode("utf-8", errors="replace").split("\n")[:-1]
        if not lines:
            self._write_header({"schema": JOURNAL_SCHEMA, "fingerprint": self.fingerprint})
            return
        entries = [self._parse(line, number) for number, line in enumerate(lines, start=1)]
        header: Any = (read_json(self.label) or {}) if self.label is not None else entries.pop(0)
        if header.get("schema") != JOURNAL_SCHEMA:
            raise RequestError(f"{self.path} is not a journal of brim; give another path")
        if entries and not self._resume:
            raise RequestError(
                f"{self.path} holds {len(entries)} results of an earlier run; resume it, or give another path"
            )
        if header.get("fingerprint") != self.fingerprint:
            parts = differing_parts(str(header.get("fingerprint")), self.fingerprint)
            others = f": {' and '.join(parts)} differ" if parts else ""
            raise RequestError(
                f"{self.path} was written for other items or settings{others} (fingerprint "
                f"{header.get('fingerprint')}, now {self.fingerprint}); resume with what it was started with, or give "
                "another path"
            )
        self.entries = entries

    def _write_header(self, header: dict[str, Any]) -> None:
        if self.label is not None:
            write_json(self.label, header)
        else:
            _write_all(self._file, (json.dumps(header) + "\n").encode())

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise RequestError(f"{self.path}, line {number}: not an entry of a journal; the file was changed by hand")
        return entry

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cannot(self, error: OSError) -> RequestError:
        reason = error.strerror or error
        return RequestError(f"cannot write {self.path}: {reason}; what was finished before is kept, resume from it")


def _write_all(file: int, data: bytes) -> None:
    """A full disk may take a part of the bytes: it is cut off at the next start like any unfinished line."""
    while data:
        data = data[os.write(file, data) :]
