"""Files written whole or not at all; JSON and rows of CSV as their text."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError

__all__ = [
    "cache_folder", "cannot_write", "csv_text", "encode", "read_json", "usual_mode", "write_atomic", "write_json",
]  # fmt: skip


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    A folder that cannot be written, or a full disk, is a `RequestError` that names the path.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(encode(content) if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(usual_mode())  # a temporary file is its owner's alone; a report is to be shared
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def encode(text: str) -> bytes:
    """UTF-8. A lone surrogate, which UTF-8 cannot hold, becomes its escape: in JSON it is read back as it was."""
    return text.encode("utf-8", errors="backslashreplace")


def cannot_write(path: Path, error: Exception) -> RequestError:
    """The message for a file that cannot be written: a folder that is not ours, a full disk."""
    reason = getattr(error, "strerror", None) or str(error)
    return RequestError(f"cannot write {path}: {reason}; free space or choose another folder")


def usual_mode() -> int:
    """What a file gets that is simply opened."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_json(path: Path, data: Any) -> None:
    """Write one JSON document atomically."""
    write_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON document; None when it is not there or not JSON (a cache entry that is neither is no entry)."""
    try:
        if not path.is_file():  # a pipe or a device may have no end
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def cache_folder() -> Path:
    """Where brim keeps what it may lose: `$XDG_CACHE_HOME/brim`, by default `~/.cache/brim`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "brim"


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
