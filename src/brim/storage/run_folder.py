"""One run, one folder: `run.json`, written atomically, and whether a folder can take a run at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brim.errors import RequestError
from brim.settings.caller import given
from brim.storage.files import read_json, write_json

__all__ = [
    "RUN_SCHEMA", "add_notes", "check_folder", "check_no_other_run", "command_line", "keep_command_line", "write_run",
]  # fmt: skip

RUN_SCHEMA = "brim.run/1"

_command_line: list[str] = []  # of this process, where it is the `brim` command


def keep_command_line(arguments: Sequence[str]) -> None:
    """From here on every record says with which command it was made; a Python call leaves it out."""
    _command_line[:] = arguments


def command_line() -> list[str]:
    """The `brim` command of this process; empty in a Python call."""
    return list(_command_line)


def check_folder(folder: Path) -> None:
    """Raise a `RequestError` for a folder that cannot be one, before any work is done for it."""
    try:
        if "\0" in str(folder):
            raise ValueError("a name has no null byte")
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"{given('output', folder)}: it is a file; give a folder")
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        longest = os.pathconf(parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
        if any(len(os.fsencode(name)) > longest for name in folder.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except (OSError, ValueError) as error:  # a name that no file system takes
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{given('output', folder)}: {reason}; choose another folder") from error
    if not parent.is_dir():
        raise RequestError(f"{given('output', folder)}: {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(f"{given('output', folder)}: {parent} is not writable; choose another folder")


def check_no_other_run(folder: Path, command: str) -> None:
    """Raise a `RequestError` if the folder holds the record of another command, which this one would overwrite."""
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("schema") != RUN_SCHEMA:
        return
    request = record.get("request")
    found = (request.get("command") if isinstance(request, dict) else None) or record.get("kind")
    if found != command:
        raise RequestError(f"{given('output', folder)}: it holds a run of brim {found}; choose another folder")


def write_run(
    folder: Path,
    *,
    kind: str,
    request: dict[str, Any],
    environment: dict[str, Any],
    plan: dict[str, Any] | None,
    summary: dict[str, Any],
    started_at: datetime.datetime,
) -> Path:
    """Write `run.json` into the folder."""
    check_folder(folder)
    ended_at = datetime.datetime.now(datetime.UTC)
    path = folder / "run.json"
    document = {
        "schema": RUN_SCHEMA,
        "kind": kind,
        "request": {**request, "argv": command_line()} if _command_line else request,
        "environment": environment,
        "plan": plan,
        "summary": summary,
        "started_at": started_at.isoformat(),
        "ended_at": ended_at.isoformat(),
        "duration_seconds": (ended_at - started_at).total_seconds(),
    }
    write_json(path, document)
    return path


def add_notes(folder: Path, notes: Sequence[str]) -> None:
    """Append notes to the record in the folder, if there is one; a finished run does not fail for want of space."""
    record = read_json(folder / "run.json")
    if notes and isinstance(record, dict):
        record["summary"]["notes"] = [*record["summary"].get("notes", ()), *notes]
        with contextlib.suppress(RequestError):
            write_json(folder / "run.json", record)
